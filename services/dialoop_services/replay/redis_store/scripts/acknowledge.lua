local function acknowledge(item)
  local rec, stage, entry = held_group(item.lease_id)
  if not rec then return 'LEASE_LOST' end
  if stage == 'unscored' and item.outcome == 'consumed' then
    if not rec.scored then return 'NOT_SCORED' end
  elseif stage == 'unscored' and rec.scored then
    return 'ALREADY_SCORED'
  elseif rec.state == 'consumed' or rec.state == 'dropped' then
    if rec.state == item.outcome then return '' end
    return rec.state == 'consumed' and 'ALREADY_CONSUMED' or 'ALREADY_DROPPED'
  end
  if entry.gone then return '' end
  remove_entry(rec, stage) -- before other writes: see "Above maxmemory" in ledger.lua
  if stage ~= 'unscored' or item.outcome ~= 'consumed' then
    if item.outcome == 'consumed' then consume(rec) else drop(rec, item.reason) end
  end
  save(rec)
  return ''
end

local outcomes = {}
for i, item in ipairs(call.items) do
  local reason = acknowledge(item)
  outcomes[i] = {lease_id = item.lease_id, acknowledged = reason == '', reason = reason}
end
return {cjson.encode({outcomes = outcomes})}
