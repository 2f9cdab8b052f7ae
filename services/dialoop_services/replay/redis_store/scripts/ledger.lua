-- One run's ledger and the transitions between its states, the same functions as in
-- services/dialoop_services/replay/memory_store/ledger.py. This text precedes every other script.
--
-- KEYS[1]   "dialoop:{run}:", the prefix of all keys; its braces put them into one cluster slot
-- ARGV[1]   now in ms, or "" for this server's clock
-- ARGV[2]   the request's fields as JSON, with `limits` (QueueLimits) and `store`; of a task,
--           trajectory or group it has the facts, and ARGV[3] and later have the raw bytes. Appends have
--           `keeper` and a `mark` of each item, leases `asker` and `since` (at_hand.py)
--
-- Records, counts and bytes of members are read once and written once: they change in Lua's tables,
-- and `flush` writes them when the script has ended. A group that one call brings whole never has
-- its members written apart.
--
-- Above maxmemory Redis refuses what may need memory, but not in a script that has written before. So
-- a script that shall work then begins its writes with a deletion, and offers and appends do not.
--
-- A script returns the response's fields as JSON, then its tasks or groups as raw bytes in order; an
-- append then returns the beginnings of the groups whose `marks` it returns.
-- If it refuses the request it returns {refused = reason, detail}.
--
-- The ledger's clock goes with the server's, but never backwards, and between two calls by at most
-- MAX_STEP_MS: if the server's clock jumps, or Redis was away, no lease runs out for it.
--
-- meta      hash: format, cursor, lineage, number, max_outstanding, order, token, epoch (the last),
--           clock ("<server's ms>:<ledger's ms>")
-- lineages  hash: lineage -> highest number announced
-- counts    hash: "<purpose>:<state>", "<purpose>:dropped:<reason>", "<purpose>:t:...", ...
-- tasks     hash: task id -> beginning of its serialised group, with the task, until it closes
-- members   hash: "<index>/<task id>" -> serialised group of this trajectory, until it closes; bytes
--           of groups that follow each other are one group with the trajectories of all
-- ledger    hash: task id -> record as JSON (below); small, and kept so that repeats are noticed
-- played:<purpose>   zset: task id by when it was leased
-- offered:<purpose>  zset: task id by order       ready:<stage>  zset: task id by entry order
-- ranked    zset: entry order and id of each task in ready:scored, by priority, the highest first
-- finished  list: ids of consumed and dropped tasks, oldest first; records of older ones are deleted
-- deadlines          zset: lease id by deadline
-- registry  hash: "<role>/<name>" -> Member as JSON, with `ends_at` in ms; kept for a day after
-- unscored, scored, evaluation, dead   streams: {g = group id, b = serialised group}
--
-- Record: id, p(urpose), n(um trajectories), o(rder), s(tate), refused (it found no room in the
--   queue), m(embers' digests, '' until finished; in one string once the group has closed),
--   c(ount of finished members), b(ytes of them), v = {lineage = {oldest, newest}}, sc(ored),
--   dead = {...}; until the group closes k (fewest trajectories), t(ime of the offer in ms), a(ttempt),
--   l(ast lease), ok (a member was finished under it), f(ailures of each member), x
--   (members that failed as l ran out), i(ds of finished trajectories), h (marks of finished members);
--   e = {stage = {o(rder), t(ime it came), l(ease), w(orker), n(um deliveries), f(ailures), i(nnocent), b(ytes),
--   gone, h (marks of the group)}}. A mark says which process of the service has bytes at hand (at_hand.py)
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
local FORMAT = '3'
if format ~= FORMAT and redis.call('EXISTS', key('ledger')) == 1 then
  return {cjson.encode({refused = 'STORE_FORMAT'})}
end

-- Most arguments of one command; Lua's stack ends at 8,000.
local PAGE = 1000
-- By task id, false where there is none; those that `flush` writes; what it adds to counts.
local records, changed, added = {}, {}, {}
-- Where the bytes of members are that came with this call, {of, first, last, h} by task and member.
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

local function bytes_of(part)
  if part.first == 1 and part.last == #part.of then return part.of end
  return string.sub(part.of, part.first, part.last)
end

local function member_key(id, member) return string.format('%d/', member - 1) .. id end

local function add_member(rec, member, part)
  new_members[rec.id] = new_members[rec.id] or {}
  new_members[rec.id][member] = part
end

local function write_pairs(name, values)
  for first = 1, #values, PAGE do
    redis.call('HSET', key(name), unpack(values, first, math.min(#values, first + PAGE - 1)))
  end
end

-- Write what the script has changed.
local function flush()
  local values = {}
  for id, parts in pairs(new_members) do
    for member, part in pairs(parts) do
      values[#values + 1], values[#values + 2] = member_key(id, member), bytes_of(part)
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
  if rec.s == 'leased' then redis.call('ZREM', key('played:' .. rec.p), rec.id) end
  if state == 'leased' then redis.call('ZADD', key('played:' .. rec.p), now, rec.id) end
  count(rec.p .. ':' .. rec.s, -1)
  count(rec.p .. ':' .. state, 1)
  rec.s = state
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

-- Ended leases of members are remembered, so that an orphan which renews its lease late is refused.
local REMEMBERED_MS = 24 * 3600 * 1000

local function member_id(member) return member.role .. '/' .. member.name end

local function find_member(id)
  local raw = redis.call('HGET', key('registry'), id)
  return raw and cjson.decode(raw) or nil
end

local function write_member(id, member)
  redis.call('HDEL', key('registry'), id) -- first, so that a full Redis lets members stay
  redis.call('HSET', key('registry'), id, cjson.encode(member))
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

local function push_task(rec) redis.call('ZADD', key('offered:' .. rec.p), rec.o, rec.id) end
local function pull_task(rec) redis.call('ZREM', key('offered:' .. rec.p), rec.id) end

local finish, make_room
-- Groups that this call dropped for want of room, by reason.
local overflowed = {}

local function drop(rec, reason)
  move(rec, 'dropped')
  count(rec.p .. ':dropped:' .. reason, 1)
  count(rec.p .. ':t:live', -rec.c)
  count(rec.p .. ':t:dropped:' .. reason, rec.c)
  finish(rec)
end

local function consume(rec)
  move(rec, 'consumed')
  count(rec.p .. ':t:live', -rec.c)
  count(rec.p .. ':t:consumed', rec.c)
  finish(rec)
end

local function entry_id(entry) return string.format('%.0f-0', entry.o) end

-- A ready group of a stage by its priority, the oldest first among equals; ranked_id reads it back.
local function ranked(rec, stage) return string.format('%016.0f', rec.e[stage].o) .. rec.id end
local function ranked_id(member) return string.sub(member, 17) end

local function add_ready(rec, stage)
  local entry = rec.e[stage]
  redis.call('ZADD', key('ready:' .. stage), entry.o, rec.id)
  if stage == 'scored' then redis.call('ZADD', key('ranked'), -(entry.pr or 0), ranked(rec, stage)) end
end

-- Return whether the group was ready.
local function remove_ready(rec, stage)
  local was_ready = redis.call('ZREM', key('ready:' .. stage), rec.id) == 1
  if was_ready and stage == 'scored' then redis.call('ZREM', key('ranked'), ranked(rec, stage)) end
  return was_ready
end

-- Of the groups that this call made ready and that have marks: these, and the beginnings of the groups.
local ready_marks, ready_heads = {}, {}

local has_stream = {}
-- Put a group into a stage. `head` begins its bytes where `marks` are of its members.
local function add_entry(rec, stage, payload, priority, marks, head)
  local stream, order = key(stage), next_order()
  if not has_stream[stage] and redis.call('EXISTS', stream) == 0 then
    redis.call('XGROUP', 'CREATE', stream, WORKERS, '0', 'MKSTREAM')
  end
  has_stream[stage] = true
  rec.e[stage] = {o = order, t = now, l = '', n = 0, f = 0, b = #payload,
                  pr = priority, h = marks}
  redis.call('XADD', stream, entry_id(rec.e[stage]), 'g', rec.id, 'b', payload)
  add_ready(rec, stage)
  if marks then ready_marks[#ready_marks + 1], ready_heads[#ready_heads + 1] = marks, head end
end

local function open_members(rec)
  local open = {}
  for i = 1, rec.n do
    if rec.m[i] == '' and rec.f[i] < limits.max_attempts then open[#open + 1] = i - 1 end
  end
  return open
end

local function has_open_member(rec)
  for i = 1, rec.n do
    if rec.m[i] == '' and rec.f[i] < limits.max_attempts then return true end
  end
  return false
end

-- Forget of a closed group what only open ones need: every script reads and writes the whole record.
local function freeze_members(rec)
  rec.m = table.concat(rec.m, ',')
  rec.f, rec.x, rec.l, rec.ok, rec.a, rec.k = nil, nil, nil, nil, nil, nil
  rec.t = nil
end

local function is_closed(rec) return type(rec.m) == 'string' end

-- Return the digests of a group's members by number, '' where one is not finished.
local function digests_of(rec)
  if not is_closed(rec) then return rec.m end
  local digests = {}
  for digest in string.gmatch(rec.m .. ',', '([^,]*),') do digests[#digests + 1] = digest end
  return digests
end

-- Return the digest of a closed group, without what scoring changes; nil for one that is open.
local function digest_of(rec)
  if not is_closed(rec) then return nil end
  local digests = {}
  for digest in string.gmatch(rec.m, '[^,]+') do
    digests[#digests + 1] = string.match(digest, '^[^.]*')
  end
  return table.concat(digests, ',')
end

-- Return the marks of a group's finished members, or nil unless all are of the process that appends.
local function marks_of(rec)
  local marks = {}
  if not call.keeper or not rec.h then return nil end
  for i = 1, rec.n do
    if rec.m[i] ~= '' then
      local mark = rec.h[tostring(i)]
      if not mark or string.sub(mark, 1, #call.keeper) ~= call.keeper then return nil end
      marks[#marks + 1] = mark
    end
  end
  return table.concat(marks, ',')
end

-- Take the parts of a group whose members are all finished or given up; return its bytes, the marks of
-- its members and what precedes them.
local function assemble(rec)
  local head = redis.call('HGET', key('tasks'), rec.id)
  local parts = {head}
  local new, run = new_members[rec.id] or {}, nil
  for i = 1, rec.n do
    if rec.m[i] ~= '' then
      local part = new[i]
      if run and part and run.of == part.of and run.last + 1 == part.first then
        run.last = part.last
      else
        if run then parts[#parts + 1] = bytes_of(run) end
        run = part
      end
      if not part then
        local member = member_key(rec.id, i)
        parts[#parts + 1] = redis.call('HGET', key('members'), member)
        redis.call('HDEL', key('members'), member)
      end
    end
  end
  if run then parts[#parts + 1] = bytes_of(run) end
  -- All of one payload is in the group, and nothing else.
  local is_whole = run and #parts == 2 and run.first == 1 and run.last == #run.of
  local marks = is_whole and run.h or marks_of(rec)
  new_members[rec.id] = nil
  redis.call('HDEL', key('tasks'), rec.id)
  return table.concat(parts), marks, head
end

-- Close the group if the rule says so (Assembly.closing), or drop it; return whether it ended.
local function close(rec, reason)
  if has_open_member(rec) then return false end
  if rec.s == 'offered' then pull_task(rec) end -- the lease had run out, and nobody took over
  end_lease(rec.l)
  count(rec.p .. ':t:waiting', -rec.c)
  local payload, marks, head = assemble(rec)
  rec.i, rec.h = nil, nil
  if rec.c < rec.n and (rec.k == 0 or rec.c < rec.k) then
    drop(rec, reason)
    return true
  end
  freeze_members(rec)
  if rec.c < rec.n then count(rec.p .. ':short', 1) end
  if rec.p == EVALUATION then
    move(rec, 'scored')
    add_entry(rec, 'evaluation', payload, nil, marks, head)
  elseif next(rec.v) == nil then
    drop(rec, 'no_trainable_token')
  elseif not make_room() then
    rec.refused = true
    overflowed.no_room = (overflowed.no_room or 0) + 1
    drop(rec, 'no_room')
  else
    move(rec, 'unscored')
    add_entry(rec, 'unscored', payload, nil, marks, head)
  end
  return true
end

-- End the task's lease and offer the task again for its open members; `members` failed, none: all.
-- Return whether the group was dropped instead.
local function release(rec, reason, failed, members)
  end_lease(rec.l)
  if failed then
    local named = {}
    for _, i in ipairs(members) do named[i] = true end
    for _, i in ipairs(open_members(rec)) do
      if #members == 0 or named[i] then rec.f[i + 1] = rec.f[i + 1] + 1 end
    end
  end
  if close(rec, reason) then return rec.s == 'dropped' end
  rec.a = rec.a + 1
  move(rec, 'offered')
  push_task(rec)
  return false
end

local function remove_entry(rec, stage)
  local entry = rec.e[stage]
  remove_ready(rec, stage)
  end_lease(entry.l)
  redis.call('XACK', key(stage), WORKERS, entry_id(entry))
  redis.call('XDEL', key(stage), entry_id(entry))
  entry.gone, entry.h = true, nil
end

-- Drop a group that nobody holds, with its entry in the stage where it is ready.
local function drop_entry(rec, stage, reason)
  remove_entry(rec, stage)
  rec.e[stage].l = ''
  drop(rec, reason)
  save(rec)
end

-- Return the group that waited longest for the scorer or the trainer, with its stage.
local function oldest_waiting()
  local oldest, oldest_stage
  for _, stage in ipairs({'scored', 'unscored'}) do
    local id = redis.call('ZRANGE', key('ready:' .. stage), 0, 0)[1]
    local rec = id and load(id)
    if rec and (not oldest or rec.e.unscored.o < oldest.e.unscored.o) then
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

-- Note that the task has ended, and forget the oldest of those that have, if too many. A dead letter
-- is kept until it is forgotten, and then ends a second time. The caller saves the record itself.
finish = function(rec)
  local num = redis.call('RPUSH', key('finished'), rec.id)
  for _ = limits.max_finished + 1, num do
    local id = redis.call('LPOP', key('finished'))
    local oldest = id ~= rec.id and load(id)
    if oldest and (oldest.s == 'consumed' or oldest.s == 'dropped') and not oldest.dead then
      for stage, entry in pairs(oldest.e) do
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
  count(rec.p .. ':dropped:dead_letter', -1)
  count(rec.p .. ':t:dropped:dead_letter', -rec.c)
end

-- Delete a dead letter; its group stays dropped, with dead_letter_forgotten as reason.
local function forget_letter(item)
  local rec = load(item[2][2])
  redis.call('XDEL', key('dead'), item[1])
  uncount_dead(rec)
  count(rec.p .. ':dropped:dead_letter_forgotten', 1)
  count(rec.p .. ':t:dropped:dead_letter_forgotten', rec.c)
  finish(rec)
  save(rec)
end

local function add_dead_letter(rec, stage, reason)
  local entry = rec.e[stage]
  local id = redis.call('XADD', key('dead'), '*', 'g', rec.id, 'b', read(stage, entry_id(entry)))
  rec.dead = {id = id, stage = stage, reason = reason, n = entry.n}
  remove_entry(rec, stage)
  entry.l = ''
  drop(rec, 'dead_letter')
  local num_over = redis.call('XLEN', key('dead')) - limits.max_dead_letters
  if num_over > 0 then
    local oldest = redis.call('XRANGE', key('dead'), '-', '+', 'COUNT', num_over)
    for _, item in ipairs(oldest) do forget_letter(item) end
  end
end

local function redeliver(rec, stage, reason, failed, aside)
  local entry = rec.e[stage]
  end_lease(entry.l)
  if stage == 'unscored' and rec.sc then
    -- The scored copy is in the queue, so nobody needs the unscored one.
    remove_entry(rec, stage)
    return false
  end
  if failed then entry.f = entry.f + 1 end
  if aside or entry.f >= limits.max_deliveries then
    add_dead_letter(rec, stage, reason)
    return true
  end
  if rec.s == 'training' or rec.s == 'trained' then move(rec, 'scored') end
  add_ready(rec, stage)
  return false
end

local function held_task(lease)
  local kind, id = parse_lease(lease)
  local rec = kind == 'task' and load(id)
  return rec and rec.l == lease and rec.s == 'leased' and rec or nil
end

-- Lease an offered task again to its last holder, whose lease has expired; return its record, or nil.
local function revive(lease)
  local kind, id = parse_lease(lease)
  local rec = kind == 'task' and load(id)
  if not rec or rec.l ~= lease or rec.s ~= 'offered' then return nil end
  pull_task(rec)
  -- The expiry counted as a failure, but the holder is still at work.
  for _, i in ipairs(rec.x) do rec.f[i + 1] = rec.f[i + 1] - 1 end
  rec.x = {}
  rec.a = rec.a - 1
  move(rec, 'leased')
  save(rec)
  return rec
end

-- Return the group whose last lease this is, even if it expired or left since.
local function held_group(lease)
  local kind, id = parse_lease(lease)
  local rec = kind and kind ~= 'task' and load(id)
  local entry = rec and rec.e[kind]
  if entry and entry.l == lease then return rec, kind, entry end
end

-- Extend a group's lease to lease_s from now, even if it expired and nobody took it.
local function hold(rec, stage, lease_s)
  local entry = rec.e[stage]
  if remove_ready(rec, stage) then
    -- Its expiry counted as a failure, but the holder is still at work.
    if not entry.i then entry.f = entry.f - 1 end
    if stage ~= 'unscored' then move(rec, 'training') end
  end
  redis.call('ZADD', key('deadlines'), deadline(lease_s), entry.l)
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

-- Append every item of the call, whose bytes begin at ARGV[3]; `append` answers for each part of an
-- item why it is not appended, or ''; return those reasons, and by item the groups that were dropped
-- for want of room.
local function append_all(append)
  local reasons, overflows = {}, {}
  local function answer(reason)
    if reason == 'DUPLICATE' then count('duplicates', 1)
    elseif reason ~= '' then count('rejected', 1) end
    reasons[#reasons + 1] = reason
  end
  for i, item in ipairs(call.items) do
    append(i, item, ARGV[2 + i], answer)
    if next(overflowed) then overflows[tostring(i)], overflowed = overflowed, {} end
  end
  local reply = {cjson.encode({reasons = reasons, overflows = overflows, marks = ready_marks})}
  for i, head in ipairs(ready_heads) do reply[i + 1] = head end
  return reply
end

for _, lease in ipairs(redis.call('ZRANGEBYSCORE', key('deadlines'), '-inf', now)) do
  local rec = held_task(lease)
  if rec then
    -- Who finished a member under the lease did not die of the task at once.
    rec.x = rec.ok and {} or open_members(rec)
    release(rec, 'lease_expired', not rec.ok, {})
    save(rec)
  else
    local held, stage, entry = held_group(lease)
    if held then
      redeliver(held, stage, 'lease_expired', not entry.i)
      save(held)
    end
  end
end
