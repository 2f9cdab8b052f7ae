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
local function append(item, payload)
  local kind, id = parse_lease(item.lease_id)
  if kind ~= 'task' then return 'LEASE_LOST' end
  local rec, member = load(id), item.trajectory
  if not rec then return 'UNKNOWN_TASK' end
  if item.member < 0 or item.member >= rec.n then return 'WRONG_SIZE' end
  if rec.refused then return 'NO_ROOM' end
  local finished = rec.m and rec.m[item.member + 1] or ''
  if finished ~= '' then
    return finished == member.digest and 'DUPLICATE' or 'DIGEST_MISMATCH'
  end
  if rec.l ~= item.lease_id or (rec.s ~= 'leased' and rec.s ~= 'offered') then
    return 'LEASE_LOST'
  end
  if not are_announced(member.versions) then return 'FUTURE_VERSION' end
  rec.i = rec.i or {}
  if rec.i[member.trajectory_id] then return 'TRAJECTORY_REPEATED' end
  if rec.b + #payload > limits.max_lease_bytes then return 'TOO_LARGE' end
  -- Above maxmemory Redis refuses this, while the call has written nothing.
  if not has_written then redis.call('HINCRBY', key('counts'), 'duplicates', 0) end
  has_written = true
  rec.i[member.trajectory_id] = true
  new_members[member_key(rec, item.member)] = payload
  rec.m[item.member + 1], rec.c, rec.b, rec.ok = member.digest, rec.c + 1, rec.b + #payload, true
  merge(rec.v, member.versions)
  count(rec.p .. ':t:generated', 1 + item.num_discarded)
  count(rec.p .. ':t:dropped:member_retried', item.num_discarded)
  count(rec.p .. ':t:live', 1)
  count(rec.p .. ':t:waiting', 1)
  close(rec, 'member_failed')
  save(rec)
  return rec.refused and 'NO_ROOM' or ''
end

if is_full() then return refused('STORE_FULL') end
return append_all(append)
