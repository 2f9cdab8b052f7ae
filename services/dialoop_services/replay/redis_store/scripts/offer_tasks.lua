if #call.tasks > 0 and is_full() then return refused('STORE_FULL') end
local cursor = meta('cursor')
if call.expected_cursor ~= '' or call.next_cursor ~= '' then
  if call.expected_cursor ~= cursor then return refused('CURSOR_MOVED', cursor) end
  cursor = call.next_cursor
  set_meta('cursor', cursor)
end
if #call.tasks > 0 then set_meta('format', FORMAT) end
local num_new, ids = 0, {}
for i, task in ipairs(call.tasks) do ids[i] = task.task_id end
preload(ids)
for i, task in ipairs(call.tasks) do
  if not load(task.task_id) then
    local rec = {id = task.task_id, p = task.purpose, n = task.num_trajectories,
                 k = task.min_trajectories, o = next_order(), s = 'offered', a = 1, l = '',
                 t = now, m = {}, f = {}, x = {}, c = 0, b = 0, v = {}, e = {}}
    for member = 1, rec.n do rec.m[member], rec.f[member] = '', 0 end
    redis.call('HSET', key('tasks'), rec.id, ARGV[2 + i])
    count(rec.p .. ':offered', 1)
    push_task(rec)
    save(rec)
    num_new = num_new + 1
  end
end
return {cjson.encode({num_new = num_new, num_known = #call.tasks - num_new, cursor = cursor})}
