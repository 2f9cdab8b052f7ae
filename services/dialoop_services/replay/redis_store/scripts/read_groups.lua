-- Return the bytes of groups by their leases, '' for one that has gone.
local reply = {'{}'}
for i, lease in ipairs(call.lease_ids) do
  local rec, stage, entry = held_group(lease)
  reply[i + 1] = rec and not entry.gone and read(stage, entry_id(entry)) or ''
end
return reply
