-- call: leases, lease_ms, max_bytes; all or none
local lost, held, bytes = {}, {}, 0
for i, lease in ipairs(call.leases) do
  local rec, stage, entry = held_group(lease)
  if rec and not entry.gone then
    held[i] = {rec = rec, stage = stage, entry = entry}
    bytes = bytes + entry.b
  else
    lost[#lost + 1] = lease
  end
end
if #lost > 0 then return {cjson.encode({leases = {}, lost = lost})} end
if bytes > call.max_bytes then return {cjson.encode({too_large = true})} end

local leases, reply = {}, {''}
for i, one in ipairs(held) do
  hold(one.rec, one.stage, now + call.lease_ms)
  one.entry.i = true
  save(one.rec)
  leases[i] = {id = one.entry.l, n = one.entry.n}
  reply[i + 1] = read(one.stage, entry_id(one.entry))
end
reply[1] = cjson.encode({leases = leases, lost = lost})
return reply
