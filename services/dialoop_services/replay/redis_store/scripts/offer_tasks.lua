if #call.tasks > 0 and is_full() then return refused('STORE_FULL') end
local cursor = meta('cursor')
local before, page = cursor, nil
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
    if before ~= cursor then page = page or new_page(before) end
    local rec = {page = page and page.id, id = task.task_id, purpose = task.purpose, num_members = task.num_trajectories,
                 fewest = task.min_trajectories, order = next_order(), state = 'offered',
                 attempt = 1, lease = '', offered_at = now, digests = {}, failures = {},
                 expired = {}, num_finished = 0, num_bytes = 0, versions = {}, entries = {}}
    for member = 1, rec.num_members do rec.digests[member], rec.failures[member] = '', 0 end
    redis.call('HSET', key('tasks'), rec.id, ARGV[2 + i])
    count(rec.purpose .. ':offered', 1)
    push_task(rec)
    save(rec)
    num_new = num_new + 1
  end
end
if page then write_page(page, num_new) end
return {cjson.encode({num_new = num_new, num_known = #call.tasks - num_new, cursor = cursor})}
