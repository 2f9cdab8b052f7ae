local entries, from = {}, 0
repeat
  local page, ids, leases = redis.call('ZRANGE', key('deadlines'), from, from + PAGE - 1), {}, {}
  for _, lease in ipairs(page) do
    local kind, id = parse_lease(lease)
    if kind == call.stage then leases[#leases + 1], ids[#ids + 1] = lease, id end
  end
  preload(ids)
  for _, lease in ipairs(leases) do
    local rec, _, entry = held_group(lease)
    if rec and entry.worker == call.worker then entries[#entries + 1] = entry end
  end
  from = from + PAGE
until #page < PAGE
table.sort(entries, function(a, b) return a.order < b.order end)
local leases = {}
for i, entry in ipairs(entries) do leases[i] = entry.lease end
return {cjson.encode({lease_ids = leases})}
