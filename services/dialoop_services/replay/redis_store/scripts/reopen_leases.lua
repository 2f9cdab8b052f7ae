-- Reopen the leases whose groups fit one answer, or none if one is lost.
local lost, held = {}, {}
for i, lease in ipairs(call.lease_ids) do
  local rec, stage, entry = held_group(lease)
  if rec and not entry.gone then
    held[i] = {rec = rec, stage = stage, entry = entry}
  else
    lost[#lost + 1] = lease
  end
end
if #lost > 0 then return {cjson.encode({lost_lease_ids = lost})} end

local leases, reply = {}, {''}
local num_fitting = count_fitting(held, function(group) return group.entry.num_bytes end)
for i = 1, num_fitting do
  local group = held[i]
  hold(group.rec, group.stage, call.lease_s)
  group.entry.innocent = true
  save(group.rec)
  leases[i] = {lease_id = group.entry.lease, num_deliveries = group.entry.num_deliveries,
               expires_in_s = call.lease_s}
  reply[i + 1] = read(group.stage, entry_id(group.entry))
end
reply[1] = cjson.encode({leases = leases, is_cut = num_fitting < #held})
return reply
