local member = call.member
local id = member_id(member)
local present = find_member(id)
if member.epoch > 0 and present and present.epoch > member.epoch then
  return refused('MEMBER_REPLACED', id)
end
local last, is_admitted = tonumber(meta('epoch')) or 0, false
if member.epoch == 0 then
  -- Above all epochs that a store gave which has lost this run.
  member.epoch = math.max(last + 1, now)
elseif present and present.epoch == member.epoch then
  if present.address ~= member.address or present.rest_address ~= member.rest_address then
    return refused('MEMBER_MOVED', id)
  end
  is_admitted = present.is_admitted
end
if member.policy_version.lineage == '' then member.policy_version = nil end
if #member.serves == 0 then member.serves = nil end -- Lua would write it as {}
member.is_admitted, member.ends_at = is_admitted, deadline(call.lease_s)
write_member(id, member)
set_meta('epoch', string.format('%.0f', math.max(last, member.epoch)))
return {cjson.encode({epoch = member.epoch, is_admitted = is_admitted})}
