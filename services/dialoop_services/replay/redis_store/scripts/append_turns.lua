-- Keep turns of episodes in play; the last bytes of a turn are its snapshot's.
local function append(item, bytes)
  local num_bytes = #bytes
  local rec, reason = played_task(item.lease_id)
  if not rec then return reason end
  local member, turn = item.member + 1, item.turn
  if member < 1 or member > rec.num_members then return 'WRONG_SIZE' end
  if rec.digests[member] ~= '' then return 'LEASE_LOST' end
  local kept = turns_of(rec.id, member)
  if turn.turn == 0 and kept and kept.trajectory_id ~= turn.trajectory_id then
    drop_turns(rec.id, member)
    kept = nil
  end
  kept = kept or {trajectory_id = turn.trajectory_id, num = 0, num_bytes = 0}
  if kept.trajectory_id ~= turn.trajectory_id or turn.turn > kept.num then return 'STEP_GAP' end
  local name = turn_key(rec.id, member, turn.turn)
  local snapshot = string.sub(bytes, #bytes - turn.num_snapshot_bytes + 1)
  bytes = string.sub(bytes, 1, #bytes - turn.num_snapshot_bytes)
  if turn.turn < kept.num then
    return redis.call('HGET', key('turns'), name) == bytes and 'DUPLICATE' or 'DIGEST_MISMATCH'
  end
  if kept.num_bytes + num_bytes > limits.max_lease_bytes then
    drop_turns(rec.id, member)
    return 'TOO_LARGE'
  end
  kept.num, kept.num_bytes = kept.num + 1, kept.num_bytes + #bytes
  redis.call('HSET', key('turns'), name, bytes, member_key(rec.id, member), cjson.encode(kept),
             snapshot_key(rec.id, member), snapshot)
  if not rec.has_progress then
    rec.has_progress = true
    save(rec)
  end
  return ''
end

if is_full() then return refused('STORE_FULL') end
return {cjson.encode({outcomes = append_all(append, false)})}
