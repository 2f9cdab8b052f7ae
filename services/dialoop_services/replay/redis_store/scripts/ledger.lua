-- One run's ledger and the transitions between its states. This text precedes every other script.
--
-- KEYS[1]   "dialoop:{run}:", the prefix of all keys; its braces put them into one cluster slot
-- ARGV[1]   now in ms, or "" for this server's clock
-- ARGV[2]   the request's fields as JSON, with `limits` (QueueLimits) and `store`; of a task,
--           trajectory or group it has the facts, and ARGV[3] and later have the bytes
--
-- Records, counts and bytes of members are read once and written once: they change in Lua's tables,
-- and `flush` writes them when the script has ended. A group that one call brings whole never has
-- its members written apart.
--
-- Above maxmemory Redis refuses what may need memory, but not in a script that has written before. So
-- a script that shall work then begins its writes with a deletion, and offers and appends do not.
--
-- A script returns the response's fields as JSON, then its tasks or groups as raw bytes in order.
-- If it refuses the request it returns {refused = reason, detail}.
--
-- The ledger's clock goes with the server's, but never backwards, and between two calls by at most
-- MAX_STEP_MS: if the server's clock jumps, or Redis was away, no lease runs out for it.
--
-- meta      hash: format, cursor, lineage, number, max_outstanding, order, token, epoch (the last),
--           clock ("<server's ms>:<ledger's ms>")
-- lineages  hash: lineage -> highest number announced
-- counts    hash: "<purpose>:<state>", "<purpose>:dropped:<reason>", "<purpose>:trajectories:...", ...
-- tasks     hash: task id -> beginning of its serialised group, with the task, until it closes
-- members   hash: "<index>/<task id>" -> serialised group of this trajectory, until it closes
-- turns     hash: "<turn>.<index>/<task id>" -> serialised GetTurnsResponse of this turn, and
--           "<index>/<task id>" -> {trajectory_id, num, num_bytes}, of a member that is being played;
--           "s.<index>/<task id>" -> the same message with the last turn's snapshot
-- ledger    hash: task id -> record as JSON (below); small, and kept so that repeats are noticed
-- played:<purpose>   zset: task id by when it was leased
-- offered:<purpose>  zset: task id by order       ready:<stage>  zset: task id by entry order
-- pages     hash: number -> {cursor, left} of each page of tasks of which some have not ended
-- ranked    zset: entry order and id of each task in ready:scored, by priority, the highest first
-- finished  list: ids of consumed and dropped tasks, oldest first; records of older ones are deleted
-- deadlines          zset: lease id by deadline
-- registry  hash: "<role>/<name>" -> Instance as JSON, with `ends_at` in ms; kept for a day after
-- unscored, scored, evaluation, dead   streams: {group = its id, bytes = serialised group}
--
-- Record of a task:
--   id, purpose, num_members, order, state
--   page           number of the page that it came with, until it ends
--   digests        of its members, '' until one is finished; in one string once the group has closed
--   num_finished, num_bytes   of its members
--   versions       {lineage = {oldest, newest}}
--   refused        it found no room in the queue
--   scored         its scored group was appended
--   dead           {id, stage, reason, num_deliveries} of a dead letter
--   entries        {stage = entry}
-- and until the group closes:
--   fewest         members that make a group
--   offered_at     in ms
--   attempt, lease    the last ones
--   has_progress   a member or a turn was finished under the lease
--   failures       of each member
--   expired        members that failed as the lease ran out
--   trajectory_ids    of its finished members, as keys
-- Entry of a stage: order, came_at, lease, worker, num_deliveries, num_failures, num_bytes, priority,
--   innocent (its delivery does not count as failed), gone
local TRAINING, EVALUATION = 1, 2
local WORKERS = 'workers'

local function key(name) return KEYS[1] .. name end

local call = cjson.decode(ARGV[2])
local limits = call.limits

local function meta(field) return redis.call('HGET', key('meta'), field) or '' end
local function set_meta(field, value) redis.call('HSET', key('meta'), field, value) end

local MAX_STEP_MS = 10000
local format, clock = unpack(redis.call('HMGET', key('meta'), 'format', 'clock'))
local now, new_clock = tonumber(ARGV[1]), nil
if not now then
  local time = redis.call('TIME')
  local server = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
  local server_then, now_then = string.match(clock or '', '^(%d+):(%d+)$')
  local passed = server - (tonumber(server_then) or server)
  now = (tonumber(now_then) or server) + math.max(0, math.min(passed, MAX_STEP_MS))
  -- Not at every call: a call that changes nothing else need not wait for the disk.
  if not server_then or passed < 0 or passed >= 1000 then
    new_clock = string.format('%.0f:%.0f', server, now)
  end
end

-- Groups are kept as protobuf wrote them, so what another format wrote cannot be read.
local FORMAT = '4'
if format ~= FORMAT and redis.call('EXISTS', key('ledger')) == 1 then
  return {cjson.encode({refused = 'STORE_FORMAT'})}
end

-- Most arguments of one command; Lua's stack ends at 8,000.
local PAGE = 1000
-- By task id, false where there is none; those that `flush` writes; what it adds to counts.
local records, changed, added = {}, {}, {}
-- Bytes of members that came with this call, by task and member.
local new_members = {}
local order

-- Read the records of these tasks with one command, so that `load` finds them.
local function preload(ids)
  for first = 1, #ids, PAGE do
    local last = math.min(#ids, first + PAGE - 1)
    local raws = redis.call('HMGET', key('ledger'), unpack(ids, first, last))
    for i = first, last do
      local raw = raws[i - first + 1]
      if records[ids[i]] == nil then records[ids[i]] = raw and cjson.decode(raw) end
    end
  end
end

-- Return the one record of a task in this call; changes to it are written if `save` is called.
local function load(task_id)
  local rec = records[task_id]
  if rec == nil then
    local raw = redis.call('HGET', key('ledger'), task_id)
    rec = raw and cjson.decode(raw)
    records[task_id] = rec
  end
  return rec or nil
end

local function save(rec) records[rec.id], changed[rec.id] = rec, rec end

local function forget(task_id)
  records[task_id], changed[task_id] = false, nil
  redis.call('HDEL', key('ledger'), task_id)
end

local function count(field, by) added[field] = (added[field] or 0) + by end
local function counted(field)
  return tonumber(redis.call('HGET', key('counts'), field) or '0') + (added[field] or 0)
end

local function member_key(id, member) return string.format('%d/', member - 1) .. id end

local function add_member(rec, member, bytes)
  new_members[rec.id] = new_members[rec.id] or {}
  new_members[rec.id][member] = bytes
end

-- What is kept of the turns of a member that is being played, or nil.
local function turns_of(id, member)
  local raw = redis.call('HGET', key('turns'), member_key(id, member))
  return raw and cjson.decode(raw) or nil
end

local function turn_key(id, member, turn) return string.format('%d.', turn) .. member_key(id, member) end

local function snapshot_key(id, member) return 's.' .. member_key(id, member) end

local function drop_turns(id, member)
  local kept = turns_of(id, member)
  if not kept then return end
  redis.call('HDEL', key('turns'), member_key(id, member), snapshot_key(id, member))
  for turn = 0, kept.num - 1 do redis.call('HDEL', key('turns'), turn_key(id, member, turn)) end
end

local function write_pairs(name, values)
  for first = 1, #values, PAGE do
    redis.call('HSET', key(name), unpack(values, first, math.min(#values, first + PAGE - 1)))
  end
end

-- Write what the script has changed.
local function flush()
  local values = {}
  for id, members in pairs(new_members) do
    for member, bytes in pairs(members) do
      values[#values + 1], values[#values + 2] = member_key(id, member), bytes
    end
  end
  write_pairs('members', values)
  values = {}
  for id, rec in pairs(changed) do
    values[#values + 1], values[#values + 2] = id, cjson.encode(rec)
  end
  write_pairs('ledger', values)
  for field, by in pairs(added) do
    if by ~= 0 then redis.call('HINCRBY', key('counts'), field, by) end
  end
  if order then set_meta('order', string.format('%.0f', order)) end
  if new_clock and redis.call('EXISTS', key('meta')) == 1 then
    redis.call('HDEL', key('meta'), 'clock') -- first, so that a full Redis lets it go on
    set_meta('clock', new_clock)
  end
  new_members, changed, added, order = {}, {}, {}, nil
end

local function move(rec, state)
  if rec.state == 'leased' then redis.call('ZREM', key('played:' .. rec.purpose), rec.id) end
  if state == 'leased' then redis.call('ZADD', key('played:' .. rec.purpose), now, rec.id) end
  count(rec.purpose .. ':' .. rec.state, -1)
  count(rec.purpose .. ':' .. state, 1)
  rec.state = state
end

-- Return how many training groups are played and not yet with the trainer.
local function num_waiting()
  return counted(TRAINING .. ':unscored') + counted(TRAINING .. ':scored')
end

local function credits()
  local waiting, leased = num_waiting(), counted(TRAINING .. ':leased')
  local outstanding = leased + waiting + counted(TRAINING .. ':training')
  local free = (tonumber(meta('max_outstanding')) or 0) - outstanding
  if limits.max_waiting_groups > 0 and limits.overflow == 'block' then
    free = math.min(free, limits.max_waiting_groups - waiting - leased)
  end
  return math.max(0, free)
end

local function next_order()
  order = (order or tonumber(meta('order')) or 0) + 1
  return order
end

local function refused(reason, detail)
  return {cjson.encode({refused = reason, detail = detail})}
end

local function deadline(lease_s) return now + math.floor(lease_s * 1000 + 0.5) end

-- Ended leases of instances are remembered, so that an orphan which renews its lease late is refused.
local REMEMBERED_MS = 24 * 3600 * 1000

local function instance_id(instance) return instance.role .. '/' .. instance.name end

local function find_instance(id)
  local raw = redis.call('HGET', key('registry'), id)
  return raw and cjson.decode(raw) or nil
end

local function write_instance(id, instance)
  redis.call('HDEL', key('registry'), id) -- first, so that a full Redis lets instances stay
  redis.call('HSET', key('registry'), id, cjson.encode(instance))
end

-- Return a lease of each task, in order.
local function new_leases(kind, task_ids)
  if #task_ids == 0 then return {} end
  -- Tokens start at the clock, so that leases of a purged run are never used again.
  redis.call('HSETNX', key('meta'), 'token', string.format('%.0f', now * 1000))
  local token = redis.call('HINCRBY', key('meta'), 'token', #task_ids) - #task_ids
  local leases, scored, ends = {}, {}, deadline(call.lease_s)
  for i, id in ipairs(task_ids) do
    leases[i] = kind .. '/' .. string.format('%.0f', token + i) .. '/' .. id
    scored[2 * i - 1], scored[2 * i] = ends, leases[i]
  end
  for first = 1, #scored, PAGE do
    redis.call('ZADD', key('deadlines'), unpack(scored, first, math.min(#scored, first + PAGE - 1)))
  end
  return leases
end

local function parse_lease(lease) return string.match(lease, '^(%a+)/%d+/(.*)$') end

local function end_lease(lease)
  if lease ~= '' then redis.call('ZREM', key('deadlines'), lease) end
end

local function push_task(rec) redis.call('ZADD', key('offered:' .. rec.purpose), rec.order, rec.id) end
local function pull_task(rec) redis.call('ZREM', key('offered:' .. rec.purpose), rec.id) end

local finish, make_room
-- Number of groups that this call dropped for want of room, by reason.
local overflowed = {}

local function drop(rec, reason)
  move(rec, 'dropped')
  count(rec.purpose .. ':dropped:' .. reason, 1)
  count(rec.purpose .. ':trajectories:live', -rec.num_finished)
  count(rec.purpose .. ':trajectories:dropped:' .. reason, rec.num_finished)
  finish(rec)
end

local function consume(rec)
  move(rec, 'consumed')
  count(rec.purpose .. ':trajectories:live', -rec.num_finished)
  count(rec.purpose .. ':trajectories:consumed', rec.num_finished)
  finish(rec)
end

local function entry_id(entry) return string.format('%.0f-0', entry.order) end

-- A ready group of a stage by its priority, the oldest first among equals; ranked_id reads it back.
local function ranked(rec, stage) return string.format('%016.0f', rec.entries[stage].order) .. rec.id end
local function ranked_id(member) return string.sub(member, 17) end

local function add_ready(rec, stage)
  local entry = rec.entries[stage]
  redis.call('ZADD', key('ready:' .. stage), entry.order, rec.id)
  if stage == 'scored' then redis.call('ZADD', key('ranked'), -(entry.priority or 0), ranked(rec, stage)) end
end

-- Return whether the group was ready.
local function remove_ready(rec, stage)
  local was_ready = redis.call('ZREM', key('ready:' .. stage), rec.id) == 1
  if was_ready and stage == 'scored' then redis.call('ZREM', key('ranked'), ranked(rec, stage)) end
  return was_ready
end

local has_stream = {}
local function add_entry(rec, stage, payload, priority)
  local stream, order = key(stage), next_order()
  if not has_stream[stage] and redis.call('EXISTS', stream) == 0 then
    redis.call('XGROUP', 'CREATE', stream, WORKERS, '0', 'MKSTREAM')
  end
  has_stream[stage] = true
  rec.entries[stage] = {order = order, came_at = now, lease = '', num_deliveries = 0,
                        num_failures = 0, num_bytes = #payload, priority = priority}
  redis.call('XADD', stream, entry_id(rec.entries[stage]), 'group', rec.id, 'bytes', payload)
  add_ready(rec, stage)
end

local function open_members(rec)
  local open = {}
  for i = 1, rec.num_members do
    if rec.digests[i] == '' and rec.failures[i] < limits.max_attempts then open[#open + 1] = i - 1 end
  end
  return open
end

local function has_open_member(rec)
  for i = 1, rec.num_members do
    if rec.digests[i] == '' and rec.failures[i] < limits.max_attempts then return true end
  end
  return false
end

-- Forget of a closed group what only open ones need: every script reads and writes the whole record.
local function freeze_members(rec)
  rec.digests = table.concat(rec.digests, ',')
  rec.failures, rec.expired, rec.trajectory_ids = nil, nil, nil
  rec.lease, rec.has_progress, rec.attempt = nil, nil, nil
  rec.fewest, rec.offered_at = nil, nil
end

local function is_closed(rec) return type(rec.digests) == 'string' end

-- Return the digests of a group's members by number, '' where one is not finished.
local function digests_of(rec)
  if not is_closed(rec) then return rec.digests end
  local digests = {}
  for digest in string.gmatch(rec.digests .. ',', '([^,]*),') do digests[#digests + 1] = digest end
  return digests
end

-- Return the digest of a closed group, without what scoring changes; nil for one that is open.
local function digest_of(rec)
  if not is_closed(rec) then return nil end
  local digests = {}
  for digest in string.gmatch(rec.digests, '[^,]+') do
    digests[#digests + 1] = string.match(digest, '^[^.]*')
  end
  return table.concat(digests, ',')
end

-- Take the head and the finished members of a group of which no other is to be played; return them as
-- one serialised group: protobuf reads messages that follow each other as one.
local function assemble(rec)
  local parts, new = {redis.call('HGET', key('tasks'), rec.id)}, new_members[rec.id] or {}
  for i = 1, rec.num_members do
    if new[i] then
      parts[#parts + 1] = new[i]
    elseif rec.digests[i] ~= '' then
      parts[#parts + 1] = redis.call('HGET', key('members'), member_key(rec.id, i))
      redis.call('HDEL', key('members'), member_key(rec.id, i))
    end
  end
  new_members[rec.id] = nil
  redis.call('HDEL', key('tasks'), rec.id)
  return table.concat(parts)
end

-- Close the group if the rule says so, or drop it; return whether it ended.
local function close(rec, reason)
  if has_open_member(rec) then return false end
  for i = 1, rec.num_members do
    if rec.digests[i] == '' then drop_turns(rec.id, i) end
  end
  if rec.state == 'offered' then pull_task(rec) end -- the lease had run out, and nobody took over
  end_lease(rec.lease)
  count(rec.purpose .. ':trajectories:waiting', -rec.num_finished)
  local payload = assemble(rec)
  if rec.num_finished < rec.num_members and (rec.fewest == 0 or rec.num_finished < rec.fewest) then
    drop(rec, reason)
    return true
  end
  freeze_members(rec)
  if rec.num_finished < rec.num_members then count(rec.purpose .. ':short', 1) end
  if rec.purpose == EVALUATION then
    move(rec, 'scored')
    add_entry(rec, 'evaluation', payload)
  elseif next(rec.versions) == nil then
    drop(rec, 'no_trainable_token')
  elseif not make_room() then
    rec.refused = true
    overflowed.no_room = (overflowed.no_room or 0) + 1
    drop(rec, 'no_room')
  else
    move(rec, 'unscored')
    add_entry(rec, 'unscored', payload)
  end
  return true
end

-- End the task's lease and offer the task again for its open members; `members` failed, none: all.
-- Return whether the group was dropped instead.
local function release(rec, reason, failed, members)
  end_lease(rec.lease)
  if failed then
    local named = {}
    for _, i in ipairs(members) do named[i] = true end
    for _, i in ipairs(open_members(rec)) do
      if #members == 0 or named[i] then
        rec.failures[i + 1] = rec.failures[i + 1] + 1
        -- Who did not come back may have been killed; what failed is played anew.
        if reason ~= 'lease_expired' then drop_turns(rec.id, i + 1) end
      end
    end
  end
  if close(rec, reason) then return rec.state == 'dropped' end
  rec.attempt = rec.attempt + 1
  move(rec, 'offered')
  push_task(rec)
  return false
end

local function remove_entry(rec, stage)
  local entry = rec.entries[stage]
  remove_ready(rec, stage)
  end_lease(entry.lease)
  redis.call('XACK', key(stage), WORKERS, entry_id(entry))
  redis.call('XDEL', key(stage), entry_id(entry))
  entry.gone = true
end

-- Drop a group that nobody holds, with its entry in the stage where it is ready.
local function drop_entry(rec, stage, reason)
  remove_entry(rec, stage)
  rec.entries[stage].lease = ''
  drop(rec, reason)
  save(rec)
end

-- Return the group that waited longest for the scorer or the trainer, with its stage.
local function oldest_waiting()
  local oldest, oldest_stage
  for _, stage in ipairs({'scored', 'unscored'}) do
    local id = redis.call('ZRANGE', key('ready:' .. stage), 0, 0)[1]
    local rec = id and load(id)
    if rec and (not oldest or rec.entries.unscored.order < oldest.entries.unscored.order) then
      oldest, oldest_stage = rec, stage
    end
  end
  return oldest, oldest_stage
end

-- Return whether one more group may wait, after dropping the oldest where overflow says so.
make_room = function()
  local most, overflow = limits.max_waiting_groups, limits.overflow
  if most == 0 or overflow == 'block' then return true end
  while overflow == 'drop_oldest' and num_waiting() >= most do
    local rec, stage = oldest_waiting()
    if not rec then break end
    overflowed.dropped_oldest = (overflowed.dropped_oldest or 0) + 1
    drop_entry(rec, stage, 'dropped_oldest')
  end
  return num_waiting() < most
end

-- A page of tasks that came with one step of the cursor, from `cursor` on, and how many have not ended.
local function new_page(cursor) return {id = string.format('%.0f', next_order()), cursor = cursor} end

local function write_page(page, left)
  if left > 0 then
    redis.call('HSET', key('pages'), page.id, cjson.encode({cursor = page.cursor, left = left}))
  else
    redis.call('HDEL', key('pages'), page.id)
  end
end

local function leave_page(rec)
  local raw = rec.page and redis.call('HGET', key('pages'), rec.page)
  if raw then
    local page = cjson.decode(raw)
    write_page({id = rec.page, cursor = page.cursor}, page.left - 1)
  end
  rec.page = nil
end

-- Return the position in the data before which every task has ended once; a requeued dead letter has.
local function settled_cursor()
  local first, cursor
  local flat = redis.call('HGETALL', key('pages'))
  for i = 1, #flat, 2 do
    local id = tonumber(flat[i])
    if not first or id < first then first, cursor = id, cjson.decode(flat[i + 1]).cursor end
  end
  return first and cursor or meta('cursor')
end

-- Note that the task has ended, and forget the oldest of those that have, if too many. A dead letter
-- is kept until it is forgotten, and then ends a second time. The caller saves the record itself.
finish = function(rec)
  leave_page(rec)
  local num = redis.call('RPUSH', key('finished'), rec.id)
  for _ = limits.max_finished + 1, num do
    local id = redis.call('LPOP', key('finished'))
    local oldest = id ~= rec.id and load(id)
    if oldest and (oldest.state == 'consumed' or oldest.state == 'dropped') and not oldest.dead then
      for stage, entry in pairs(oldest.entries) do
        if not entry.gone then remove_entry(oldest, stage) end
      end
      forget(id)
    end
  end
end

local function read(stream, id)
  local fields = redis.call('XRANGE', key(stream), id, id)[1][2]
  return fields[4]
end

local function uncount_dead(rec)
  rec.dead = nil
  count(rec.purpose .. ':dropped:dead_letter', -1)
  count(rec.purpose .. ':trajectories:dropped:dead_letter', -rec.num_finished)
end

-- Delete a dead letter; its group stays dropped, with dead_letter_forgotten as reason.
local function forget_letter(item)
  local rec = load(item[2][2])
  redis.call('XDEL', key('dead'), item[1])
  uncount_dead(rec)
  count(rec.purpose .. ':dropped:dead_letter_forgotten', 1)
  count(rec.purpose .. ':trajectories:dropped:dead_letter_forgotten', rec.num_finished)
  finish(rec)
  save(rec)
end

local function add_dead_letter(rec, stage, reason)
  local entry = rec.entries[stage]
  local id = redis.call('XADD', key('dead'), '*', 'group', rec.id, 'bytes', read(stage, entry_id(entry)))
  rec.dead = {id = id, stage = stage, reason = reason, num_deliveries = entry.num_deliveries}
  remove_entry(rec, stage)
  entry.lease = ''
  drop(rec, 'dead_letter')
  local num_over = redis.call('XLEN', key('dead')) - limits.max_dead_letters
  if num_over > 0 then
    local oldest = redis.call('XRANGE', key('dead'), '-', '+', 'COUNT', num_over)
    for _, item in ipairs(oldest) do forget_letter(item) end
  end
end

local function redeliver(rec, stage, reason, failed, aside)
  local entry = rec.entries[stage]
  end_lease(entry.lease)
  if stage == 'unscored' and rec.scored then
    -- The scored copy is in the queue, so nobody needs the unscored one.
    remove_entry(rec, stage)
    return false
  end
  if failed then entry.num_failures = entry.num_failures + 1 end
  if aside or entry.num_failures >= limits.max_deliveries then
    add_dead_letter(rec, stage, reason)
    return true
  end
  if rec.state == 'training' or rec.state == 'trained' then move(rec, 'scored') end
  add_ready(rec, stage)
  return false
end

-- Return the open task whose last lease this is, even if it expired, or why there is none.
local function played_task(lease)
  local kind, id = parse_lease(lease)
  if kind ~= 'task' then return nil, 'LEASE_LOST' end
  local rec = load(id)
  if not rec then return nil, 'UNKNOWN_TASK' end
  local is_open = rec.state == 'leased' or rec.state == 'offered'
  if rec.lease ~= lease or not is_open then return nil, 'LEASE_LOST' end
  return rec
end

local function held_task(lease)
  local kind, id = parse_lease(lease)
  local rec = kind == 'task' and load(id)
  return rec and rec.lease == lease and rec.state == 'leased' and rec or nil
end

-- Lease an offered task again to its last holder, whose lease has expired; return its record, or nil.
local function revive(lease)
  local kind, id = parse_lease(lease)
  local rec = kind == 'task' and load(id)
  if not rec or rec.lease ~= lease or rec.state ~= 'offered' then return nil end
  pull_task(rec)
  -- The expiry counted as a failure, but the holder is still at work.
  for _, i in ipairs(rec.expired) do rec.failures[i + 1] = rec.failures[i + 1] - 1 end
  rec.expired = {}
  rec.attempt = rec.attempt - 1
  move(rec, 'leased')
  save(rec)
  return rec
end

-- Return the group whose last lease this is, even if it expired or left since.
local function held_group(lease)
  local kind, id = parse_lease(lease)
  local rec = kind and kind ~= 'task' and load(id)
  local entry = rec and rec.entries[kind]
  if entry and entry.lease == lease then return rec, kind, entry end
end

-- Extend a group's lease to lease_s from now, even if it expired and nobody took it.
local function hold(rec, stage, lease_s)
  local entry = rec.entries[stage]
  if remove_ready(rec, stage) then
    -- Its expiry counted as a failure, but the holder is still at work.
    if not entry.innocent then entry.num_failures = entry.num_failures - 1 end
    if stage ~= 'unscored' then move(rec, 'training') end
  end
  redis.call('ZADD', key('deadlines'), deadline(lease_s), entry.lease)
end

-- Return how many of the first items fit one answer; the first one is sent whatever its size.
local function count_fitting(items, bytes_of)
  local room = limits.max_lease_bytes
  for i, item in ipairs(items) do
    room = room - bytes_of(item)
    if room < 0 and i > 1 then return i - 1 end
  end
  return #items
end

-- Refuse new work while Redis has little memory left, so that what frees memory still runs.
local function is_full()
  local memory = redis.call('INFO', 'memory')
  local most = tonumber(string.match(memory, '\r\nmaxmemory:(%d+)')) or 0
  local used = tonumber(string.match(memory, 'used_memory:(%d+)')) or 0
  return most > 0 and used > most * limits.full_at
end

local function is_ready(rec, stage)
  return redis.call('ZSCORE', key('ready:' .. stage), rec.id) and true or false
end

-- Append every item of the call, whose bytes begin at ARGV[3]; `append` returns why one is not
-- appended, or ''. Return the outcomes, which are counted unless the items are turns.
local function append_all(append, is_counted)
  local outcomes = {}
  for i, item in ipairs(call.items) do
    local reason, status = append(item, ARGV[2 + i]), 'REJECTED'
    if reason == '' then
      status = 'APPENDED'
    elseif reason == 'DUPLICATE' then
      reason, status = '', 'DUPLICATE'
    end
    if is_counted ~= false and status ~= 'APPENDED' then
      count(status == 'DUPLICATE' and 'duplicates' or 'rejected', 1)
    end
    outcomes[i] = {status = 'APPEND_STATUS_' .. status, reason = reason}
  end
  return outcomes
end

for _, lease in ipairs(redis.call('ZRANGEBYSCORE', key('deadlines'), '-inf', now)) do
  local rec = held_task(lease)
  if rec then
    -- Who finished a member or a turn under the lease did not die of the task at once.
    rec.expired = rec.has_progress and {} or open_members(rec)
    release(rec, 'lease_expired', not rec.has_progress, {})
    save(rec)
  else
    local held, stage, entry = held_group(lease)
    if held then
      redeliver(held, stage, 'lease_expired', not entry.innocent)
      save(held)
    end
  end
end
