-- All or none.
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
for i, one in ipairs(held) do
  hold(one.rec, one.stage, call.lease_s)
  one.entry.i = true
  save(one.rec)
  leases[i] = {lease_id = one.entry.l, num_deliveries = one.entry.n, expires_in_s = call.lease_s}
  reply[i + 1] = read(one.stage, entry_id(one.entry))
end
reply[1] = cjson.encode({leases = leases})
return reply
