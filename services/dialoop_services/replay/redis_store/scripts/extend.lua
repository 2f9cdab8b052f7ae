local lost = {}
for _, lease in ipairs(call.lease_ids) do
  local task = held_task(lease) or revive(lease)
  if task then
    end_lease(lease)
    redis.call('ZADD', key('deadlines'), deadline(call.lease_s), lease)
  else
    local rec, stage, entry = held_group(lease)
    if rec and not entry.gone then
      hold(rec, stage, call.lease_s)
      save(rec)
    else
      lost[#lost + 1] = lease
    end
  end
end
return {cjson.encode({lost_lease_ids = lost})}
