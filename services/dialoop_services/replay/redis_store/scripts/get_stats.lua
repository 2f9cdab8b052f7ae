local FIELDS = {
  offered = 'num_tasks_offered', leased = 'num_groups_leased', unscored = 'num_groups_unscored',
  scored = 'num_groups_scored', training = 'num_groups_training', trained = 'num_groups_trained',
  consumed = 'num_groups_consumed', ['trajectories:generated'] = 'num_trajectories_generated',
  ['trajectories:consumed'] = 'num_trajectories_consumed', ['trajectories:live'] = 'num_trajectories_live',
  ['trajectories:waiting'] = 'num_trajectories_waiting', short = 'num_groups_closed_short'}

local function empty() return {num_groups_dropped = {}, num_trajectories_dropped = {}} end
local ledgers = {[TRAINING] = empty(), [EVALUATION] = empty()}

flush() -- what expired leases changed
local flat = redis.call('HGETALL', key('counts'))
for i = 1, #flat, 2 do
  local purpose, name = string.match(flat[i], '^(%d):(.*)$')
  local ledger, value = ledgers[tonumber(purpose)], tonumber(flat[i + 1])
  local group_reason = name and string.match(name, '^dropped:(.*)$')
  local trajectory_reason = name and string.match(name, '^trajectories:dropped:(.*)$')
  if not ledger or value == 0 then -- a count of the whole run, or 0, is not listed
  elseif FIELDS[name] then ledger[FIELDS[name]] = value
  elseif group_reason then ledger.num_groups_dropped[group_reason] = value
  elseif trajectory_reason then ledger.num_trajectories_dropped[trajectory_reason] = value end
end

-- A record of a version without times has no age.
local function add_age(purpose, state, since)
  local ages = ledgers[purpose].oldest_s or {}
  if since then ages[state] = (now - since) / 1000 end
  ledgers[purpose].oldest_s = ages
end

-- Return the first of a sorted set, which is the oldest: orders rise with the clock.
local function first_of(name)
  local id = redis.call('ZRANGE', key(name), 0, 0)[1]
  return id and load(id)
end

for _, purpose in ipairs({TRAINING, EVALUATION}) do
  local rec = first_of('offered:' .. purpose)
  if rec then add_age(purpose, 'offered', rec.offered_at) end
  add_age(purpose, 'leased', tonumber(redis.call('ZRANGE', key('played:' .. purpose), 0, 0, 'WITHSCORES')[2]))
end
for stage, place in pairs({unscored = {TRAINING, 'unscored'}, scored = {TRAINING, 'scored'},
                           evaluation = {EVALUATION, 'scored'}}) do
  local rec = first_of('ready:' .. stage)
  if rec then add_age(place[1], place[2], rec.entries[stage].came_at) end
end

local stats = {
  training = ledgers[TRAINING], evaluation = ledgers[EVALUATION],
  max_outstanding_groups = tonumber(meta('max_outstanding')) or 0, credits = credits(),
  num_redelivered = counted('redelivered'), num_dead_letters = redis.call('XLEN', key('dead')),
  num_duplicate_appends = counted('duplicates'), num_rejected_appends = counted('rejected'),
  cursor = meta('cursor'), settled_cursor = settled_cursor(), store = call.store, is_full = is_full()}
if meta('lineage') ~= '' then
  stats.policy_version = {lineage = meta('lineage'), number = tonumber(meta('number'))}
end
return {cjson.encode({stats = stats})}
