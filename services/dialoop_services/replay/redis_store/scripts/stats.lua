return {cjson.encode({credits = credits()}), redis.call('HGETALL', key('counts')),
        redis.call('HGETALL', key('meta')), redis.call('XLEN', key('dead'))}
