// Package replicas tests a gateway of several replicas as its clients see it:
// new connections, and tunnels that stand, while replicas are replaced and
// killed, and while the API server is away or forbids.
package replicas
