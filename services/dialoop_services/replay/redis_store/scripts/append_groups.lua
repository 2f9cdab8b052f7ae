local function are_announced(versions)
  if meta('max_outstanding') == '' then return true end
  for lineage, span in pairs(versions) do
    local highest = tonumber(redis.call('HGET', key('lineages'), lineage) or '-1')
    if span[2] > highest then return false end
  end
  return true
end

local function append_played(item, group, payload)
  local rec = load(group.task_id)
  if not rec or rec.p ~= (call.stage == 'evaluation' and EVALUATION or TRAINING) then
    return 'UNKNOWN_TASK'
  end
  if rec.g ~= '' and rec.g == group.group_id then
    return rec.d == group.digest and 'DUPLICATE' or 'DIGEST_MISMATCH'
  end
  local name = group.task_id .. '#' .. string.format('%.0f', rec.a)
  if rec.l == '' or rec.l ~= item.lease_id or name ~= group.group_id then return 'LEASE_LOST' end
  if group.num_trajectories ~= rec.n then return 'WRONG_SIZE' end
  if not are_announced(group.versions) then return 'FUTURE_VERSION' end
  end_lease(rec.l)
  rec.l, rec.g, rec.d, rec.v = '', group.group_id, group.digest, group.versions
  redis.call('HDEL', key('tasks'), rec.id)
  move(rec, call.stage == 'unscored' and 'unscored' or 'scored')
  add_entry(rec, call.stage, payload)
  count(rec.p .. ':t:generated', rec.n + item.num_discarded)
  count(rec.p .. ':t:dropped:member_retried', item.num_discarded)
  count(rec.p .. ':t:live', rec.n)
  save(rec)
  return ''
end

local function append_scored(item, group, payload)
  local rec = load(group.task_id)
  if not rec or rec.p ~= TRAINING then return 'UNKNOWN_TASK' end
  if rec.g ~= group.group_id then return 'LEASE_LOST' end
  if rec.d ~= group.digest then return 'DIGEST_MISMATCH' end
  if rec.sc then return 'DUPLICATE' end
  local entry = rec.e.unscored
  if rec.s ~= 'unscored' or entry.l == '' or entry.l ~= item.lease_id then return 'LEASE_LOST' end
  rec.sc = true
  move(rec, 'scored')
  add_entry(rec, 'scored', payload)
  -- The lease had expired and nobody took the group over; nobody needs to score it now.
  if is_ready(rec, 'unscored') then remove_entry(rec, 'unscored') end
  save(rec)
  return ''
end

local append = call.stage == 'scored' and append_scored or append_played
local outcomes = {}
for i, item in ipairs(call.items) do
  local reason = append(item, item.group, ARGV[2 + i])
  if reason == '' then
    outcomes[i] = {status = 'APPEND_STATUS_APPENDED'}
  elseif reason == 'DUPLICATE' then
    count('duplicates', 1)
    outcomes[i] = {status = 'APPEND_STATUS_DUPLICATE'}
  else
    count('rejected', 1)
    outcomes[i] = {status = 'APPEND_STATUS_REJECTED', reason = reason}
  end
end
return {cjson.encode({outcomes = outcomes})}
