-- call: stage, groups = {{id, task, lease, n, d, v, discarded}}
local function are_known(versions)
  if meta('max_outstanding') == '' then return true end
  for lineage, span in pairs(versions) do
    local highest = tonumber(redis.call('HGET', key('lineages'), lineage) or '-1')
    if span[2] > highest then return false end
  end
  return true
end

local function append_played(group, payload)
  local rec = load(group.task)
  if not rec or rec.p ~= (call.stage == 'evaluation' and EVALUATION or TRAINING) then
    return 'UNKNOWN_TASK'
  end
  if rec.g == group.id then return rec.d == group.d and 'DUPLICATE' or 'DIGEST_MISMATCH' end
  local name = group.task .. '#' .. string.format('%.0f', rec.a)
  if rec.l == '' or rec.l ~= group.lease or name ~= group.id then return 'LEASE_LOST' end
  if group.n ~= rec.n then return 'WRONG_SIZE' end
  if not are_known(group.v) then return 'FUTURE_VERSION' end
  end_lease(rec.l)
  rec.l, rec.g, rec.d, rec.v = '', group.id, group.d, group.v
  redis.call('HDEL', key('tasks'), rec.id)
  move(rec, call.stage == 'unscored' and 'unscored' or 'scored')
  add_entry(rec, call.stage, payload)
  count(rec.p .. ':t:generated', rec.n + group.discarded)
  count(rec.p .. ':t:dropped:member_retried', group.discarded)
  count(rec.p .. ':t:live', rec.n)
  save(rec)
  return ''
end

local function append_scored(group, payload)
  local rec = load(group.task)
  if not rec or rec.p ~= TRAINING then return 'UNKNOWN_TASK' end
  if rec.g ~= group.id then return 'LEASE_LOST' end
  if rec.d ~= group.d then return 'DIGEST_MISMATCH' end
  if rec.sc then return 'DUPLICATE' end
  local entry = rec.e.unscored
  if rec.s ~= 'unscored' or entry.l == '' or entry.l ~= group.lease then return 'LEASE_LOST' end
  rec.sc = true
  move(rec, 'scored')
  add_entry(rec, 'scored', payload)
  -- The lease had expired and nobody took over: nobody has to, now.
  if is_ready(rec, 'unscored') then remove_entry(rec, 'unscored') end
  save(rec)
  return ''
end

local append = call.stage == 'scored' and append_scored or append_played
local results = {}
for i, group in ipairs(call.groups) do
  local result = append(group, ARGV[2 + i])
  if result == 'DUPLICATE' then count('duplicates', 1)
  elseif result ~= '' then count('rejected', 1) end
  results[i] = result
end
return {cjson.encode({results = results})}
