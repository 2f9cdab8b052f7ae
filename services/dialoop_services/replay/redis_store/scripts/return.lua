local num_returned, num_dropped = 0, 0

local function give_back(item)
  local rec = held_task(item.lease_id)
  if rec then
    end_lease(rec.lease)
    if item.num_trajectories > 0 then
      count(rec.purpose .. ':trajectories:generated', item.num_trajectories)
      count(rec.purpose .. ':trajectories:dropped:' .. item.reason, item.num_trajectories)
    end
    local dropped = release(rec, item.reason, item.failed, item.failed_members)
    rec.lease = ''
    save(rec)
    return true, dropped
  end
  local held, stage, entry = held_group(item.lease_id)
  if not held or not redis.call('ZSCORE', key('deadlines'), item.lease_id) then return false, false end
  local dropped = redeliver(held, stage, item.reason, item.failed, item.set_aside)
  entry.lease = ''
  save(held)
  return true, dropped
end

for _, item in ipairs(call.items) do
  local returned, dropped = give_back(item)
  if returned then num_returned = num_returned + 1 end
  if dropped then num_dropped = num_dropped + 1 end
end
return {cjson.encode({num_returned = num_returned, num_dropped = num_dropped})}
