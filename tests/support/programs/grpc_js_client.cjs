// Calls an environment service with grpc-js, as grpclib_client.py does; prints each status.
const fs = require("fs");
const grpc = require("@grpc/grpc-js");

const [end, host, port, token, ca, certificate, key] = process.argv.slice(2);
const read = (path) => (path ? fs.readFileSync(path) : undefined);
const credentials = ca
  ? grpc.credentials.createSsl(read(ca), read(key), read(certificate))
  : grpc.credentials.createInsecure();
const client = new grpc.Client(`${host}:${port}`, credentials);
const own = new grpc.Metadata();
own.set("authorization", `Bearer ${token}`);
const same = (bytes) => bytes;
const service = "/dialoop.v1.EnvironmentService";
const name = (error) => (error ? grpc.status[error.code] : "OK");
const none = Buffer.alloc(0);

const unary = (method, bytes, metadata) =>
  new Promise((done) =>
    client.makeUnaryRequest(`${service}/${method}`, same, same, bytes, metadata, {}, (e) => done(name(e))),
  );
const watch = (options, onMessage) =>
  new Promise((done) => {
    const call = client.makeServerStreamRequest("/grpc.health.v1.Health/Watch", same, same, none, own, options);
    call.on("data", (bytes) => onMessage && (call.cancel(), done(bytes.toString("hex"))));
    call.on("error", (error) => done(name(error)));
  });
const bothWays = (...messages) =>
  new Promise((done) => {
    const call = client.makeBidiStreamRequest(`${service}/Interact`, same, same, own, {});
    call.on("data", () => {});
    call.on("error", (error) => done(name(error)));
    call.on("end", () => setTimeout(() => done("OK"), 100));
    for (const message of messages) call.write(message);
    call.end();
  });

(async () => {
  const found = {
    unary: await unary("ListEnvironments", none, own),
    "without a token": await unary("ListEnvironments", none, new grpc.Metadata()),
    "not a message": await unary("ListEnvironments", Buffer.from([0xff]), own),
    "of no session": await unary("Reset", Buffer.from([10, 1, 120, 16, 1]), own),
    "a stream, then cancelled": await watch({}, true),
    "a deadline": await watch({ deadline: Date.now() + 500 }, false),
    "both ways": await bothWays(Buffer.from(end, "hex")),
    "cut off": await bothWays(),
  };
  console.log(JSON.stringify(found));
  client.close();
})();
