-- call: leases, lease_ms
local lost, deadline = {}, now + call.lease_ms
for _, lease in ipairs(call.leases) do
  if held_task(lease) then
    redis.call('ZADD', key('deadlines'), deadline, lease)
  else
    local rec, stage, entry = held_group(lease)
    if rec and not entry.gone then
      hold(rec, stage, deadline)
      save(rec)
    else
      lost[#lost + 1] = lease
    end
  end
end
return {cjson.encode({lost = lost})}
