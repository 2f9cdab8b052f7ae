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

local has_written, num_open = false, {}
-- Append a member of the group `rec`, which is still open.
local function append(rec, item, bytes)
  local member, played = item.member + 1, item.trajectory
  if member < 1 or member > rec.num_members then return 'WRONG_SIZE' end
  if rec.refused then return 'NO_ROOM' end
  local finished = digests_of(rec)[member] or ''
  if finished ~= '' then return finished == played.digest and 'DUPLICATE' or 'DIGEST_MISMATCH' end
  if rec.lease ~= item.lease_id or (rec.state ~= 'leased' and rec.state ~= 'offered') then
    return 'LEASE_LOST'
  end
  if not are_announced(played.versions) then return 'FUTURE_VERSION' end
  rec.trajectory_ids = rec.trajectory_ids or {}
  if rec.trajectory_ids[played.trajectory_id] then return 'TRAJECTORY_REPEATED' end
  if rec.num_bytes + #bytes > limits.max_lease_bytes then return 'TOO_LARGE' end
  -- Above maxmemory Redis refuses this, while the call has written nothing.
  if not has_written then redis.call('HINCRBY', key('counts'), 'duplicates', 0) end
  has_written = true
  num_open[rec.id] = num_open[rec.id] or #open_members(rec)
  if rec.failures[member] < limits.max_attempts then num_open[rec.id] = num_open[rec.id] - 1 end
  rec.trajectory_ids[played.trajectory_id] = true
  drop_turns(rec.id, member)
  add_member(rec, member, bytes)
  rec.digests[member], rec.has_progress = played.digest, true
  rec.num_finished, rec.num_bytes = rec.num_finished + 1, rec.num_bytes + #bytes
  merge(rec.versions, played.versions)
  count(rec.purpose .. ':trajectories:generated', 1 + item.num_discarded)
  count(rec.purpose .. ':trajectories:dropped:member_retried', item.num_discarded)
  count(rec.purpose .. ':trajectories:live', 1)
  count(rec.purpose .. ':trajectories:waiting', 1)
  if num_open[rec.id] == 0 then close(rec, 'member_failed') end
  save(rec)
  return rec.refused and 'NO_ROOM' or ''
end

if is_full() then return refused('STORE_FULL') end
local task_ids, ids = {}, {}
for _, item in ipairs(call.items) do
  local kind, id = parse_lease(item.lease_id)
  if kind == 'task' then
    task_ids[item] = id
    ids[#ids + 1] = id
  end
end
preload(ids)
local outcomes = append_all(function(item, bytes)
  if not task_ids[item] then return 'LEASE_LOST' end
  local rec = load(task_ids[item])
  return rec and append(rec, item, bytes) or 'UNKNOWN_TASK'
end)
return {cjson.encode({outcomes = outcomes, num_overflowed = overflowed})}
