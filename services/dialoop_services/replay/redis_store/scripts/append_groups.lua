-- Append scored groups; the servicer appends those that were played member by member.
local function append(item, payload)
  local group = item.group
  local rec = load(group.group_id)
  if not rec or rec.purpose ~= TRAINING then return 'UNKNOWN_TASK' end
  local digest = digest_of(rec)
  if not digest then return 'LEASE_LOST' end
  if digest ~= group.digest then return 'DIGEST_MISMATCH' end
  if rec.scored then return 'DUPLICATE' end
  local entry = rec.entries.unscored
  if rec.state ~= 'unscored' or entry.lease == '' or entry.lease ~= item.lease_id then
    return 'LEASE_LOST'
  end
  rec.scored = true
  move(rec, 'scored')
  add_entry(rec, 'scored', payload, item.priority)
  -- The lease had expired and nobody took the group over; nobody needs to score it now.
  if is_ready(rec, 'unscored') then remove_entry(rec, 'unscored') end
  save(rec)
  return ''
end

return {cjson.encode({outcomes = append_all(append)})}
