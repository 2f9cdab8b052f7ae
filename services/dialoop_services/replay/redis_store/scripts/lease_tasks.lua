local leases, reply = {}, {''}
local function lease(purpose, allowed)
  local waiting = key('offered:' .. purpose)
  local wanted = math.min(allowed, call.max_tasks - #leases)
  if wanted < 1 then return end
  local popped, ids = redis.call('ZPOPMIN', waiting, wanted), {}
  for i = 1, #popped, 2 do ids[#ids + 1] = popped[i] end
  preload(ids)
  for i, lease_id in ipairs(new_leases('task', ids)) do
    local rec = load(ids[i])
    move(rec, 'leased')
    rec.lease, rec.has_progress, rec.expired = lease_id, nil, {}
    save(rec)
    local members, recorded = open_members(rec), nil
    for _, i in ipairs(rec.attempt > 1 and members or {}) do
      if redis.call('HEXISTS', key('turns'), member_key(rec.id, i + 1)) == 1 then
        recorded = recorded or {}
        recorded[#recorded + 1] = i
      end
    end
    leases[#leases + 1] = {lease_id = rec.lease, attempt = rec.attempt, expires_in_s = call.lease_s,
                            members = members, recorded_members = recorded}
    reply[#reply + 1] = redis.call('HGET', key('tasks'), ids[i])
  end
end
lease(EVALUATION, call.max_tasks)
lease(TRAINING, credits())
local empty = 'NOT_EMPTY'
if #leases == 0 then
  if redis.call('ZCARD', key('offered:' .. TRAINING)) == 0 then empty = 'NO_TASKS'
  elseif meta('max_outstanding') == '' then empty = 'NO_POLICY'
  else empty = 'NO_CREDITS' end
end
reply[1] = cjson.encode({leases = leases, empty_reason = 'EMPTY_REASON_' .. empty,
                         credits = credits(), cursor = meta('cursor')})
return reply
