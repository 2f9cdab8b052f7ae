local groups, reply = {}, {''}
for i, id in ipairs(redis.call('ZRANGE', key('ready:' .. call.stage), 0, call.max_groups - 1)) do
  groups[i] = {}
  reply[i + 1] = read(call.stage, entry_id(load(id).entries[call.stage]))
end
reply[1] = cjson.encode({groups = groups})
return reply
