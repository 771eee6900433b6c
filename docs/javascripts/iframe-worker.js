// Browsers start no workers for pages that are opened as files. There, an empty frame of the page runs the search instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.appendChild(frame)
      this.scope = frame.contentWindow
      // In a worker, postMessage is the way back to the page.
      this.scope.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      const load = source => new Promise((resolve, reject) => {
        const script = this.scope.document.createElement("script")
        script.src = source
        script.onload = resolve
        script.onerror = reject
        this.scope.document.body.appendChild(script)
      })
      this.scope.importScripts = (...sources) => Promise.all(sources.map(load))
      this.ready = load(url)
    }

    postMessage(data) {
      this.ready.then(() => this.scope.dispatchEvent(new MessageEvent("message", { data })))
    }
  }
}
