local id = member_id(call)
local member = find_member(id)
local was_listed = member ~= nil and member.epoch == call.epoch and member.ends_at > now
if was_listed then
  member.ends_at = now
  write_member(id, member)
end
return {cjson.encode({was_listed = was_listed})}
