// Package deploy is the manifests that install culvert: the Helm chart of
// helm/culvert, and what renders it without Helm.
//
//	values, err := deploy.Defaults()
//	if err != nil {
//		return err
//	}
//	if err := deploy.Set(values, "dns.enabled=true"); err != nil {
//		return err
//	}
//	objects, err := deploy.Render(deploy.Release{Name: "culvert", Namespace: "culvert-system"}, values)
//	if err != nil {
//		return err
//	}
//	return deploy.WriteYAML(w, objects)
//
// What comes out is what Helm makes of the same values, byte by byte: the chart
// keeps to the few functions of Helm that are here, and a test renders it both
// ways. Values are held against the chart's schema first, as Helm does.
//
// Nothing here speaks to a cluster. The folder has also what is made from the
// chart or stands beside it: kustomize, a unit of systemd.
package deploy
