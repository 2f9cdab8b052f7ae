-- call: tasks = {{id, p, n}}, expected, next (absent: leave the cursor alone)
local cursor = meta('cursor')
if call.next then
  if call.expected ~= cursor then return {cjson.encode({moved = true, cursor = cursor})} end
  cursor = call.next
  set_meta('cursor', cursor)
end
local num_new = 0
for i, task in ipairs(call.tasks) do
  if redis.call('HEXISTS', key('ledger'), task.id) == 0 then
    local rec = {id = task.id, p = task.p, n = task.n, o = next_order(), s = 'offered',
                 a = 1, f = 0, l = '', g = '', d = '', e = {}}
    redis.call('HSET', key('tasks'), rec.id, ARGV[2 + i])
    count(rec.p .. ':offered', 1)
    push_task(rec)
    save(rec)
    num_new = num_new + 1
  end
end
return {cjson.encode({num_new = num_new, cursor = cursor})}
