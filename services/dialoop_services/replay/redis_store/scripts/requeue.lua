-- Requeue all groups, or none if one is not a dead letter.
local records = {}
for i, group in ipairs(call.group_ids) do
  local rec = load(group)
  if not rec or not rec.dead then return refused('GROUP_NOT_FOUND', group) end
  records[i] = rec
end
for _, rec in ipairs(records) do
  local dead = rec.dead
  local payload = read('dead', dead.id)
  redis.call('XDEL', key('dead'), dead.id)
  uncount_dead(rec)
  count(rec.purpose .. ':trajectories:live', rec.num_finished)
  move(rec, dead.stage == 'unscored' and 'unscored' or 'scored')
  add_entry(rec, dead.stage, payload)
  save(rec)
end
return {cjson.encode({num_requeued = #records})}
