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
    local known = versions[lineage]
    if not known then
      versions[lineage] = {span[1], span[2]}
    else
      if span[1] < known[1] then known[1] = span[1] end
      if span[2] > known[2] then known[2] = span[2] end
    end
  end
end

local has_written = false
-- Append member `place` of the item's; its bytes are a part of ARGV's. Its group is still open.
local function append(rec, item, place, part, versions)
  local member, digest, id = item.first + place, item.digests[place], item.ids[place]
  if member < 1 or member > rec.n then return 'WRONG_SIZE' end
  if rec.refused then return 'NO_ROOM' end
  local finished = digests_of(rec)[member] or ''
  if finished ~= '' then return finished == digest and 'DUPLICATE' or 'DIGEST_MISMATCH' end
  if rec.l ~= item.lease_id or (rec.s ~= 'leased' and rec.s ~= 'offered') then
    return 'LEASE_LOST'
  end
  if not are_announced(versions) then return 'FUTURE_VERSION' end
  rec.i = rec.i or {}
  if rec.i[id] then return 'TRAJECTORY_REPEATED' end
  local size = part.last - part.first + 1
  if rec.b + size > limits.max_lease_bytes then return 'TOO_LARGE' end
  -- Above maxmemory Redis refuses this, while the call has written nothing.
  if not has_written then redis.call('HINCRBY', key('counts'), 'duplicates', 0) end
  has_written = true
  rec.i[id] = true
  if #item.sizes == 1 then
    rec.h = rec.h or {}
    rec.h[tostring(member)] = item.mark
  end
  add_member(rec, member, part)
  rec.m[member], rec.c, rec.b, rec.ok = digest, rec.c + 1, rec.b + size, true
  merge(rec.v, versions)
  return ''
end

-- Append the members of an item, and close the group as soon as no member of it is open.
local function append_item(rec, item, payload, answer)
  local num_new, num_discarded, first = 0, 0, 1
  local num_open = is_closed(rec) and 0 or #open_members(rec)
  for place, size in ipairs(item.sizes) do
    local part = {of = payload, first = first, last = first + size - 1, h = item.mark}
    first = first + size
    local reason = append(rec, item, place, part, item.versions[place] or item.versions[1])
    if reason == '' then
      num_new = num_new + 1
      if place == 1 then num_discarded = item.num_discarded end
      if rec.f[item.first + place] < limits.max_attempts then num_open = num_open - 1 end
      if num_open == 0 then close(rec, 'member_failed') end
      if rec.refused then reason = 'NO_ROOM' end
    end
    answer(reason)
  end
  if num_new == 0 then return end
  count(rec.p .. ':t:generated', num_new + num_discarded)
  count(rec.p .. ':t:dropped:member_retried', num_discarded)
  count(rec.p .. ':t:live', num_new)
  count(rec.p .. ':t:waiting', num_new)
  save(rec)
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
  local rec = of_items[i] and load(of_items[i])
  if rec then
    append_item(rec, item, payload, answer)
  else
    for _ in ipairs(item.sizes) do answer(of_items[i] and 'UNKNOWN_TASK' or 'LEASE_LOST') end
  end
end)
