local rec = played_task(call.lease_id)
local member, bytes = call.member + 1, {}
local kept = rec and turns_of(rec.id, member)
for turn = 0, kept and kept.num - 1 or -1 do
  bytes[#bytes + 1] = redis.call('HGET', key('turns'), turn_key(rec.id, member, turn))
end
if kept then bytes[#bytes + 1] = redis.call('HGET', key('turns'), snapshot_key(rec.id, member)) end
return {'{}', table.concat(bytes)}
