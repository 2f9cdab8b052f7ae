-- Reopen all leases, or none if one is lost.
local lost, held, bytes = {}, {}, 0
for i, lease in ipairs(call.lease_ids) do
  local rec, stage, entry = held_group(lease)
  if rec and not entry.gone then
    held[i] = {rec = rec, stage = stage, entry = entry}
    bytes = bytes + entry.b
  else
    lost[#lost + 1] = lease
  end
end
if #lost > 0 then return {cjson.encode({lost_lease_ids = lost})} end
if bytes > limits.max_lease_bytes then return refused('TOO_LARGE') end

local leases, reply = {}, {''}
for i, group in ipairs(held) do
  hold(group.rec, group.stage, call.lease_s)
  group.entry.i = true
  save(group.rec)
  leases[i] = {lease_id = group.entry.l, num_deliveries = group.entry.n, expires_in_s = call.lease_s}
  reply[i + 1] = read(group.stage, entry_id(group.entry))
end
reply[1] = cjson.encode({leases = leases})
return reply
