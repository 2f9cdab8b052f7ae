local letters, reply = {}, {''}
for i, item in ipairs(redis.call('XRANGE', key('dead'), '-', '+', 'COUNT', call.max_groups)) do
  local rec = load(item[2][2])
  letters[i] = {group_id = rec.id, stage = 'STAGE_' .. string.upper(rec.dead.stage),
                reason = rec.dead.reason, num_deliveries = rec.dead.num_deliveries}
  reply[i + 1] = item[2][4]
end
reply[1] = cjson.encode({dead_letters = letters})
return reply
