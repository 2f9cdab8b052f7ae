local entries = {}
for _, lease in ipairs(redis.call('ZRANGE', key('deadlines'), 0, -1)) do
  local rec, stage, entry = held_group(lease)
  if rec and stage == call.stage and entry.w == call.worker then
    entries[#entries + 1] = {o = entry.o, l = lease}
  end
end
table.sort(entries, function(a, b) return a.o < b.o end)
local leases = {}
for i, entry in ipairs(entries) do leases[i] = entry.l end
return {cjson.encode({lease_ids = leases})}
