local instance = call.instance
local id = instance_id(instance)
local present = find_instance(id)
if instance.epoch > 0 and present and present.epoch > instance.epoch then
  return refused('MEMBER_REPLACED', id)
end
local last, is_admitted = tonumber(meta('epoch')) or 0, false
if instance.epoch == 0 then
  -- Above all epochs that a store gave which has lost this run.
  instance.epoch = math.max(last + 1, now)
elseif present and present.epoch == instance.epoch then
  if present.address ~= instance.address or present.rest_address ~= instance.rest_address then
    return refused('MEMBER_MOVED', id)
  end
  is_admitted = present.is_admitted
end
if instance.policy_version.lineage == '' then instance.policy_version = nil end
if #instance.serves == 0 then instance.serves = nil end -- Lua would write it as {}
instance.is_admitted, instance.ends_at = is_admitted, deadline(call.lease_s)
write_instance(id, instance)
set_meta('epoch', string.format('%.0f', math.max(last, instance.epoch)))
return {cjson.encode({epoch = instance.epoch, is_admitted = is_admitted})}
