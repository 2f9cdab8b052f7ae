local stage, ready = call.stage, key('ready:' .. call.stage)
local lineage, number = meta('lineage'), tonumber(meta('number'))

-- The same rule as services/dialoop_services/rl/staleness.py.
local function is_stale(rec)
  if stage ~= 'scored' or not call.max_staleness or not number then return false end
  for sampled_in, span in pairs(rec.v) do
    if sampled_in ~= lineage or number - span[1] > call.max_staleness then return true end
  end
  return false
end

-- Return the ready groups in another order than the oldest first: this reads the whole index.
local function ready_in_turn()
  local ids, rank, place = redis.call('ZRANGE', ready, 0, -1), {}, {}
  local token = meta('token')
  for i, id in ipairs(ids) do
    place[id] = i
    if call.selection == 'uniform' then rank[id] = redis.sha1hex(token .. '/' .. id)
    else rank[id] = -(load(id).e[stage].pr or 0) end
  end
  table.sort(ids, function(a, b)
    if rank[a] ~= rank[b] then return rank[a] < rank[b] end
    return place[a] < place[b]
  end)
  return ids
end

local ready_now = {}
-- Add the groups of these ids, and return how many of all that were looked at are still ready.
local function take(ids)
  local num_left = 0
  preload(ids)
  for _, id in ipairs(ids) do
    if #ready_now == call.max_groups then break end
    num_left = num_left + 1
    if string.sub(id, 1, #call.task_id_prefix) == call.task_id_prefix then
      local rec = load(id)
      if is_stale(rec) then
        drop_entry(rec, stage, 'stale')
        num_left = num_left - 1
      else
        ready_now[#ready_now + 1] = rec
      end
    end
  end
  return num_left
end

if call.selection == 'uniform' or call.selection == 'priority' then
  take(ready_in_turn())
else
  -- Pages of as many as are wanted: what is not leased costs nothing.
  local from = 0
  repeat
    local page = redis.call('ZRANGE', ready, from, from + call.max_groups - 1)
    from = from + take(page)
  until #page == 0 or #ready_now == call.max_groups
end

if #ready_now < math.max(1, call.min_groups) then
  local empty = #ready_now > 0 and 'EMPTY_REASON_TOO_FEW' or 'EMPTY_REASON_NO_GROUPS'
  return {cjson.encode({empty_reason = empty, num_ready = redis.call('ZCARD', ready)})}
end

local leases, reply, ids, entry_ids = {}, {''}, {}, {}
local num_fitting = count_fitting(ready_now, function(rec) return rec.e[stage].b end)
for i = 1, num_fitting do
  ids[i], entry_ids[i] = ready_now[i].id, entry_id(ready_now[i].e[stage])
end
for first = 1, num_fitting, PAGE do -- before other writes: see "Above maxmemory" in ledger.lua
  redis.call('ZREM', ready, unpack(ids, first, math.min(num_fitting, first + PAGE - 1)))
end
for i, lease_id in ipairs(new_leases(stage, ids)) do
  local rec = ready_now[i]
  local entry = rec.e[stage]
  entry.l = lease_id
  entry.w = call.worker
  entry.i = nil
  entry.n = entry.n + 1
  if entry.n > 1 then count('redelivered', 1) end
  if stage ~= 'unscored' then move(rec, 'training') end
  save(rec)
  leases[i] = {lease_id = entry.l, num_deliveries = entry.n, expires_in_s = call.lease_s}
end
for first = 1, num_fitting, PAGE do
  local last = math.min(num_fitting, first + PAGE - 1)
  -- FORCE makes entries pending under this worker, even those that were not pending before.
  local arguments = {unpack(entry_ids, first, last)}
  arguments[#arguments + 1] = 'FORCE'
  for _, claimed in ipairs(
      redis.call('XCLAIM', key(stage), WORKERS, call.worker, 0, unpack(arguments))) do
    reply[#reply + 1] = claimed[2][4]
  end
end
reply[1] = cjson.encode({leases = leases, empty_reason = 'EMPTY_REASON_NOT_EMPTY',
                         num_ready = redis.call('ZCARD', ready), is_cut = num_fitting < #ready_now})
return reply
