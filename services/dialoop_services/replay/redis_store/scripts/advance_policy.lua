local announced = call.policy_version
local lineage, number = meta('lineage'), tonumber(meta('number'))
local is_announced = redis.call('HEXISTS', key('lineages'), announced.lineage) == 1
if is_announced and (announced.lineage ~= lineage or announced.number < number) then
  return refused('VERSION_NOT_NEWER', lineage .. '-' .. string.format('%.0f', number))
end
redis.call('HDEL', key('meta'), 'lineage', 'number', 'max_outstanding')
set_meta('lineage', announced.lineage)
set_meta('number', announced.number)
set_meta('max_outstanding', call.max_outstanding_groups)
redis.call('HSET', key('lineages'), announced.lineage, announced.number)
for _, lease in ipairs(call.trained_lease_ids) do
  local rec, stage, entry = held_group(lease)
  if rec and stage == 'scored' and not entry.gone then
    if is_ready(rec, stage) then hold(rec, stage, limits.lease_s) end
    if rec.state == 'training' then move(rec, 'trained') end
    entry.innocent = true
    save(rec)
  end
end
return {cjson.encode({credits = credits()})}
