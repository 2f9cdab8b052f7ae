local ids, members = {}, {}
local flat = redis.call('HGETALL', key('registry'))
for i = 1, #flat, 2 do
  local member = cjson.decode(flat[i + 1])
  if member.ends_at + REMEMBERED_MS <= now then
    redis.call('HDEL', key('registry'), flat[i])
  elseif member.ends_at > now and (call.role == '' or call.role == member.role) then
    member.ends_at = nil
    ids[#ids + 1], members[flat[i]] = flat[i], member
  end
end
table.sort(ids)
local listed = {}
for i, id in ipairs(ids) do listed[i] = members[id] end
return {cjson.encode({members = listed})}
