import { defineConfig } from "vite";

// The build is committed, so its names and its bytes are the same wherever it is made.
export default defineConfig({
  base: "./",
  build: {
    outDir: "../services/dialoop_services/console/page",
    emptyOutDir: true,
    assetsInlineLimit: 0,
    modulePreload: false,
    rollupOptions: {
      output: {
        entryFileNames: "assets/console.js",
        chunkFileNames: "assets/[name].js",
        assetFileNames: "assets/console[extname]",
      },
    },
  },
});
