local stage, ready = call.stage, key('ready:' .. call.stage)
local lineage, number = meta('lineage'), tonumber(meta('number'))

-- The same rule as services/dialoop_learning/rl/staleness.py.
local function is_stale(rec)
  if stage ~= 'scored' or not call.max_staleness or not number then return false end
  for sampled_in, span in pairs(rec.versions) do
    if sampled_in ~= lineage or number - span[1] > call.max_staleness then return true end
  end
  return false
end

-- Return pages of ready groups, the oldest first.
local function in_order(from, most) return redis.call('ZRANGE', ready, from, from + most - 1) end

-- Return pages of ready groups, the highest priority first, the oldest among equals.
local function by_priority(from, most)
  local page = redis.call('ZRANGE', key('ranked'), from, from + most - 1)
  for i, member in ipairs(page) do page[i] = ranked_id(member) end
  return page
end

local token, swapped, num_ready = meta('token'), {}, redis.call('ZCARD', ready)
-- Return pages of a random order of the ready groups, as Fisher and Yates shuffle: only what was
-- swapped is kept.
local function at_random(from, most)
  local page = {}
  for i = from, math.min(from + most, num_ready) - 1 do
    local drawn = tonumber(string.sub(redis.sha1hex(token .. '/' .. i), 1, 13), 16)
    local j = i + drawn % (num_ready - i)
    local place = swapped[j] or j
    swapped[j] = swapped[i] or i
    page[#page + 1] = redis.call('ZRANGE', ready, place, place)[1]
  end
  return page
end

local next_page = in_order
if call.selection == 'uniform' then next_page = at_random
elseif call.selection == 'priority' and stage == 'scored' then
  next_page = by_priority
end

-- Pages of as many as are wanted: what is not leased costs nothing. What is dropped stays in the
-- indexes until all pages have been read.
local ready_now, stale, from = {}, {}, 0
repeat
  local page = next_page(from, call.max_groups)
  from = from + #page
  preload(page)
  for _, id in ipairs(page) do
    if #ready_now == call.max_groups then break end
    if string.sub(id, 1, #call.task_id_prefix) == call.task_id_prefix then
      local rec = load(id)
      if is_stale(rec) then stale[#stale + 1] = rec else ready_now[#ready_now + 1] = rec end
    end
  end
until #page == 0 or #ready_now == call.max_groups
for _, rec in ipairs(stale) do drop_entry(rec, stage, 'stale') end

if #ready_now < math.max(1, call.min_groups) then
  local empty = #ready_now > 0 and 'EMPTY_REASON_TOO_FEW' or 'EMPTY_REASON_NO_GROUPS'
  return {cjson.encode({empty_reason = empty, num_ready = redis.call('ZCARD', ready)})}
end

-- Lease entries of the stream to the worker, and return them as XCLAIM does.
local function claim(entry_ids)
  local claimed = {}
  for first = 1, #entry_ids, PAGE do
    local arguments = {unpack(entry_ids, first, math.min(#entry_ids, first + PAGE - 1))}
    -- FORCE makes entries pending under this worker, even those that were not pending before.
    arguments[#arguments + 1] = 'FORCE'
    for _, entry in ipairs(
        redis.call('XCLAIM', key(stage), WORKERS, call.worker, 0, unpack(arguments))) do
      claimed[#claimed + 1] = entry
    end
  end
  return claimed
end

local leases, reply, ids, members = {}, {''}, {}, {}
local num_fitting = count_fitting(ready_now, function(rec) return rec.entries[stage].num_bytes end)
for i = 1, num_fitting do
  local rec = ready_now[i]
  ids[i], members[i] = rec.id, ranked(rec, stage)
end
for first = 1, num_fitting, PAGE do -- before other writes: see "Above maxmemory" in ledger.lua
  local last = math.min(num_fitting, first + PAGE - 1)
  redis.call('ZREM', ready, unpack(ids, first, last))
  if stage == 'scored' then redis.call('ZREM', key('ranked'), unpack(members, first, last)) end
end
local entry_ids = {}
for i, lease_id in ipairs(new_leases(stage, ids)) do
  local rec = ready_now[i]
  local entry = rec.entries[stage]
  entry_ids[i] = entry_id(entry)
  entry.lease = lease_id
  entry.worker = call.worker
  entry.innocent = nil
  entry.num_deliveries = entry.num_deliveries + 1
  if entry.num_deliveries > 1 then count('redelivered', 1) end
  if stage ~= 'unscored' then move(rec, 'training') end
  save(rec)
  leases[i] = {lease_id = lease_id, num_deliveries = entry.num_deliveries,
               expires_in_s = call.lease_s}
end
for i, claimed in ipairs(claim(entry_ids)) do reply[i + 1] = claimed[2][4] end
reply[1] = cjson.encode({leases = leases, empty_reason = 'EMPTY_REASON_NOT_EMPTY',
                         num_ready = redis.call('ZCARD', ready), is_cut = num_fitting < #ready_now})
return reply
