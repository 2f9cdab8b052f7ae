-- Append scored groups; the servicer appends those that were played member by member.
local function append(item, payload)
  local group = item.group
  local rec = load(group.group_id)
  if not rec or rec.p ~= TRAINING then return 'UNKNOWN_TASK' end
  local digest = digest_of(rec)
  if not digest then return 'LEASE_LOST' end
  if digest ~= group.digest then return 'DIGEST_MISMATCH' end
  if rec.sc then return 'DUPLICATE' end
  local entry = rec.e.unscored
  if rec.s ~= 'unscored' or entry.l == '' or entry.l ~= item.lease_id then return 'LEASE_LOST' end
  rec.sc = true
  move(rec, 'scored')
  add_entry(rec, 'scored', payload, item.priority, item.mark, '')
  -- The lease had expired and nobody took the group over; nobody needs to score it now.
  if is_ready(rec, 'unscored') then remove_entry(rec, 'unscored') end
  save(rec)
  return ''
end

return append_all(function(_, item, payload, answer) answer(append(item, payload)) end)
