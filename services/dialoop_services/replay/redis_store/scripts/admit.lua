local id = member_id(call)
local member = find_member(id)
if not member or member.epoch ~= call.epoch or member.ends_at <= now then
  return refused('MEMBER_NOT_FOUND', id)
end
member.is_admitted = call.is_admitted
write_member(id, member)
return {'{}'}
