import { defineConfig } from "vite";

// A page that is opened from a disk may run classic scripts, but no modules.
const classicScript = {
  name: "classic-script",
  transformIndexHtml: {
    order: "post",
    handler: (html) =>
      html
        .replace('<script type="module" crossorigin ', "<script defer ")
        .replace('<link rel="stylesheet" crossorigin ', '<link rel="stylesheet" '),
  },
};

// The build is committed, so its names and its bytes are the same wherever it is made.
export default defineConfig({
  base: "./",
  plugins: [classicScript],
  build: {
    outDir: "../services/dialoop_ops/console/page",
    emptyOutDir: true,
    assetsInlineLimit: 0,
    cssCodeSplit: false, // a file of its own: the page may run no style that a script makes
    modulePreload: false,
    rollupOptions: {
      output: {
        format: "iife",
        entryFileNames: "assets/console.js",
        chunkFileNames: "assets/[name].js",
        assetFileNames: "assets/console[extname]",
      },
    },
  },
});
