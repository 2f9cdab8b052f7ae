-- call: lineage, number, trained = {lease}, max_outstanding, lease_ms
local lineage, number = meta('lineage'), tonumber(meta('number'))
local known = redis.call('HEXISTS', key('lineages'), call.lineage) == 1
if known and (call.lineage ~= lineage or call.number < number) then
  return {cjson.encode({lineage = lineage, number = number})}
end
set_meta('lineage', call.lineage)
set_meta('number', call.number)
set_meta('max_outstanding', call.max_outstanding)
redis.call('HSET', key('lineages'), call.lineage, call.number)
for _, lease in ipairs(call.trained) do
  local rec, stage, entry = held_group(lease)
  if rec and stage == 'scored' and not entry.gone then
    if is_ready(rec, stage) then hold(rec, stage, now + call.lease_ms) end
    if rec.s == 'training' then move(rec, 'trained') end
    entry.i = true
    save(rec)
  end
end
return {cjson.encode({credits = credits()})}
