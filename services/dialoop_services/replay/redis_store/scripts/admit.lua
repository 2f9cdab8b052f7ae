local id = instance_id(call)
local instance = find_instance(id)
if not instance or instance.epoch ~= call.epoch or instance.ends_at <= now then
  return refused('MEMBER_NOT_FOUND', id)
end
instance.is_admitted = call.is_admitted
write_instance(id, instance)
return {'{}'}
