-- Data keys: a key for each tenant, encrypted by a master key that the store never has. See encryption.py.
-- Keys:  shard 0  :data_keys  hash  'key:<id>' -> the encrypted key   'tenant:<name>' -> id of its key
--                                   'revision' -> number of deletions, which tells processes to forget their copies

-- data_key: the key of a tenant, which is made if it has none.
-- KEYS the hash.  ARGV tenant, proposed id, proposed record
-- returns  {'there' | 'made', id, record} {'taken'}: another key has the proposed id
local function data_key(keys, args)
  local id = redis.call('HGET', keys[1], 'tenant:' .. args[1])
  local record = id and redis.call('HGET', keys[1], 'key:' .. id)
  if record then return {'there', id, record} end
  if redis.call('HSETNX', keys[1], 'key:' .. args[2], args[3]) == 0 then return {'taken'} end
  redis.call('HSET', keys[1], 'tenant:' .. args[1], args[2])
  return {'made', args[2], args[3]}
end

-- rewrap_key: replace the record of a key, unless it was deleted or replaced since it was read.
-- KEYS the hash.  ARGV id, record as read, new record.  returns {'changed'} {'kept'}
local function rewrap_key(keys, args)
  if redis.call('HGET', keys[1], 'key:' .. args[1]) ~= args[2] then return {'kept'} end
  redis.call('HSET', keys[1], 'key:' .. args[1], args[3])
  return {'changed'}
end

-- delete_key: delete the key of a tenant.  KEYS the hash.  ARGV tenant.  returns {'deleted'} {'missing'}
local function delete_key(keys, args)
  local id = redis.call('HGET', keys[1], 'tenant:' .. args[1])
  if not id then return {'missing'} end
  redis.call('HDEL', keys[1], 'tenant:' .. args[1], 'key:' .. id)
  redis.call('HINCRBY', keys[1], 'revision', 1)
  return {'deleted'}
end

redis.register_function('deck_data_key', data_key)
redis.register_function('deck_rewrap_key', rewrap_key)
redis.register_function('deck_delete_key', delete_key)
