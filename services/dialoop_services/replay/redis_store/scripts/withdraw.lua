local id = instance_id(call)
local instance = find_instance(id)
local was_listed = instance ~= nil and instance.epoch == call.epoch and instance.ends_at > now
if was_listed then
  instance.ends_at = now
  write_instance(id, instance)
end
return {cjson.encode({was_listed = was_listed})}
