-- call: max_groups
local letters, reply = {}, {''}
for i, item in ipairs(redis.call('XRANGE', key('dead'), '-', '+', 'COUNT', call.max_groups)) do
  local group = item[2][2]
  local rec = load(string.match(group, '^(.*)#%d+$'))
  letters[i] = {g = group, stage = rec.dead.stage, reason = rec.dead.reason, n = rec.dead.n}
  reply[i + 1] = item[2][4]
end
reply[1] = cjson.encode({letters = letters})
return reply
