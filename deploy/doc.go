// Package deploy has the manifests that install culvert in Kubernetes.
//
//	objects, err := deploy.Manifests(deploy.Settings{
//		Profile: "dns", Name: "culvert", Namespace: "culvert-system", CreateNamespace: true,
//	})
//	if err != nil {
//		return err
//	}
//	return deploy.WriteYAML(w, objects)
//
// Helm renders them from the chart in helm/culvert when the chart changes, by
// "make manifests", into the folders of kustomize. They are embedded here, and
// Manifests sets in them only what Settings has. Everything else is a value of
// the chart, for those who install with Helm.
//
// Nothing here speaks to a cluster.
package deploy
