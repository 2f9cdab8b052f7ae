local ids, instances = {}, {}
local flat = redis.call('HGETALL', key('registry'))
for i = 1, #flat, 2 do
  local instance = cjson.decode(flat[i + 1])
  if instance.ends_at + REMEMBERED_MS <= now then
    redis.call('HDEL', key('registry'), flat[i])
  elseif instance.ends_at > now and (call.role == '' or call.role == instance.role) then
    instance.ends_at = nil
    ids[#ids + 1], instances[flat[i]] = flat[i], instance
  end
end
table.sort(ids)
local listed = {}
for i, id in ipairs(ids) do listed[i] = instances[id] end
return {cjson.encode({instances = listed})}
