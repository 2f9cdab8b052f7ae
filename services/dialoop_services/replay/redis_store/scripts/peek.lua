-- call: stage, max_groups
local reply = {'{}'}
for i, id in ipairs(redis.call('ZRANGE', key('ready:' .. call.stage), 0, call.max_groups - 1)) do
  reply[i + 1] = read(call.stage, entry_id(load(id).e[call.stage]))
end
return reply
