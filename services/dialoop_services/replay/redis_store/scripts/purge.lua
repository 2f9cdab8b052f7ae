-- Runs without ledger.lua, so that no record is read: one that cannot be read can be deleted.
local names = {
  'meta', 'lineages', 'counts', 'tasks', 'members', 'turns', 'ledger', 'deadlines', 'dead', 'finished',
  'registry', 'pages', 'offered:1', 'offered:2', 'played:1', 'played:2', 'unscored', 'scored',
  'evaluation', 'ready:unscored', 'ready:scored', 'ready:evaluation', 'ranked'}
for _, name in ipairs(names) do redis.call('UNLINK', KEYS[1] .. name) end
return {'{}'}
