-- Keep finished members, and close the groups of which no other member is to be played.
local has_policy, highest = meta('max_outstanding') ~= '', {}
local function are_announced(versions)
  if not has_policy then return true end
  for lineage, span in pairs(versions) do
    highest[lineage] = highest[lineage]
      or tonumber(redis.call('HGET', key('lineages'), lineage) or '-1')
    if span[2] > highest[lineage] then return false end
  end
  return true
end

local function merge(versions, more)
  for lineage, span in pairs(more) do
    local known = versions[lineage] or span
    versions[lineage] = {math.min(known[1], span[1]), math.max(known[2], span[2])}
  end
end

local has_written = false
-- Append member `place` of the item's; its bytes are a part of ARGV's.
local function append(rec, item, place, part)
  local member, digest = item.first + place, item.digests[place]
  if member < 1 or member > rec.n then return 'WRONG_SIZE' end
  if rec.refused then return 'NO_ROOM' end
  local finished, id = rec.m[member] or '', item.ids[place]
  if finished ~= '' then return finished == digest and 'DUPLICATE' or 'DIGEST_MISMATCH' end
  if rec.l ~= item.lease_id or (rec.s ~= 'leased' and rec.s ~= 'offered') then
    return 'LEASE_LOST'
  end
  if not are_announced(item.versions[place]) then return 'FUTURE_VERSION' end
  rec.i = rec.i or {}
  if rec.i[id] then return 'TRAJECTORY_REPEATED' end
  local size = part.last - part.first + 1
  if rec.b + size > limits.max_lease_bytes then return 'TOO_LARGE' end
  -- Above maxmemory Redis refuses this, while the call has written nothing.
  if not has_written then redis.call('HINCRBY', key('counts'), 'duplicates', 0) end
  has_written = true
  rec.i[id] = true
  add_member(rec, member, part)
  rec.m[member], rec.c, rec.b, rec.ok = digest, rec.c + 1, rec.b + size, true
  merge(rec.v, item.versions[place])
  local num_discarded = place == 1 and item.num_discarded or 0
  count(rec.p .. ':t:generated', 1 + num_discarded)
  count(rec.p .. ':t:dropped:member_retried', num_discarded)
  count(rec.p .. ':t:live', 1)
  count(rec.p .. ':t:waiting', 1)
  close(rec, 'member_failed')
  save(rec)
  return rec.refused and 'NO_ROOM' or ''
end

if is_full() then return refused('STORE_FULL') end
local of_items, ids = {}, {}
for i, item in ipairs(call.items) do
  local kind, id = parse_lease(item.lease_id)
  if kind == 'task' then
    of_items[i] = id
    ids[#ids + 1] = id
  end
end
preload(ids)
return append_all(function(i, item, payload, answer)
  local rec, first = of_items[i] and load(of_items[i]), 1
  for place, size in ipairs(item.sizes) do
    local part = {of = payload, first = first, last = first + size - 1}
    first = first + size
    if rec then answer(append(rec, item, place, part))
    else answer(of_items[i] and 'UNKNOWN_TASK' or 'LEASE_LOST') end
  end
end)
