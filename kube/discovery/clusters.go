package discovery

import (
	"log/slog"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

// Clusters are further clusters as one registry.Source: each is a kubeconfig,
// under the key of that name, in a Secret with the label culvert.dev/cluster: NAME.
// They come, change and go with their Secrets. Client and Namespace are needed.
type Clusters struct {
	Client    kubernetes.Interface // of the cluster that has the Secrets
	Namespace string               // that they are in

	// Own is the cluster that is known without a Secret; no Secret may be of it.
	Own string

	// New returns the Source of a cluster, to be completed with its Client,
	// Cluster and Network. Nil means a zero Source.
	New func(name string) *Source

	// Connect makes a client of a kubeconfig that has been found harmless. Nil
	// means client-go's, by protobuf.
	Connect func(*rest.Config) (kubernetes.Interface, error)

	// OnCluster is told of each cluster whose discovery begins, and what
	// it returns, if that is not nil, is called when it has ended. May be nil.
	OnCluster func(name string, cfg *rest.Config, src *Source) (ended func())

	// Log is told of what is refused. Nil discards.
	Log *slog.Logger
}
