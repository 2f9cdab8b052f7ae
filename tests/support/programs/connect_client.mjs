// Calls an environment service with connect-node, as grpclib_client.py does; prints each status.
import { readFileSync } from "node:fs";
import { create, createFileRegistry, fromBinary, toBinary } from "@bufbuild/protobuf";
import { FileDescriptorSetSchema } from "@bufbuild/protobuf/wkt";
import { Code, ConnectError, createClient } from "@connectrpc/connect";
import { createGrpcTransport } from "@connectrpc/connect-node";

const [end, host, port, token, ca, certificate, key] = process.argv.slice(2);
const read = (path) => (path ? readFileSync(path) : undefined);
const described = read(new URL("descriptors.binpb", import.meta.url));
const registry = createFileRegistry(fromBinary(FileDescriptorSetSchema, described));
const transport = createGrpcTransport({
  baseUrl: `${ca ? "https" : "http"}://${host}:${port}`,
  nodeOptions: { ca: read(ca), cert: read(certificate), key: read(key) },
});
const environments = createClient(registry.getService("dialoop.v1.EnvironmentService"), transport);
const health = createClient(registry.getService("grpc.health.v1.Health"), transport);
const request = registry.getMessage("dialoop.v1.InteractRequest");
const reset = registry.getMessage("dialoop.v1.ResetRequest");
const status = registry.getMessage("grpc.health.v1.HealthCheckResponse");
const headers = { authorization: `Bearer ${token}` };
const name = (error) => Code[ConnectError.from(error).code].replace(/(?<=.)(?=[A-Z])/g, "_").toUpperCase();
const ended = (call) => call.then(() => "OK", name);

const watch = async (options, isCancelled) => {
  const cancel = new AbortController();
  try {
    for await (const answer of health.watch({}, { headers, signal: cancel.signal, ...options })) {
      if (!isCancelled) continue;
      cancel.abort();
      return Buffer.from(toBinary(status, answer)).toString("hex");
    }
    return "OK";
  } catch (error) {
    return name(error);
  }
};
const bothWays = async (...messages) => {
  const send = async function* () {
    yield* messages;
  };
  for await (const _ of environments.interact(send(), { headers }));
};
// A text that says it has five bytes, and has none.
const cutOff = { $unknown: [{ no: 1, wireType: 2, data: Uint8Array.of(5) }] };

const found = {
  unary: await ended(environments.listEnvironments({}, { headers })),
  "without a token": await ended(environments.listEnvironments({})),
  "not a message": await ended(
    environments.reset(Object.assign(create(reset), cutOff), { headers }),
  ),
  "of no session": await ended(environments.reset({ sessionId: "x", episode: 1 }, { headers })),
  "a stream, then cancelled": await watch({}, true),
  "a deadline": await watch({ timeoutMs: 500 }, false),
  "both ways": await ended(bothWays(fromBinary(request, Buffer.from(end, "hex")))),
  "cut off": await ended(bothWays()),
};
console.log(JSON.stringify(found));
process.exit();
